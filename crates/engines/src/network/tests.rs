//! Slots on the real kernel, each test on a host of its own: the test's thread has a network
//! namespace for itself, with an uplink to a small world that the test plays. They need root and
//! nft, and say so when they are skipped.

mod caps;
mod cards;
mod hostile;
mod life;
mod lists;
mod marks;
mod packet_log;
mod private;
mod proxied;
mod reach;
mod verbs;
mod world;
