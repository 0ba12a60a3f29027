//! What every engine promises, asked of the real gVisor on this host.
//!
//! Cases are functions over an engine where nothing in them is particular to gVisor (`contract`);
//! what is particular stands in `gvisor`. Every test has its own installation (tag, directories,
//! keeper) and removes it when it ends, however it ends.

#[cfg(test)]
mod contract;
#[cfg(test)]
mod crashes;
#[cfg(test)]
mod guided;
#[cfg(test)]
mod gvisor;
#[cfg(test)]
mod keeper;
#[cfg(test)]
mod outside;
#[cfg(test)]
mod saves;
#[cfg(test)]
mod settings;
#[cfg(test)]
mod shells;
#[cfg(test)]
mod world;
