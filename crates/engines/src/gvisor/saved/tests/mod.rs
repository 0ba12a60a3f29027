//! Saves of real machines are read, compared with what the guest says, and damaged; forged ones
//! are refused.

mod encoder;
mod forged;
mod machine;
mod real;
mod repaired;
