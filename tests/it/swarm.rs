//! Swarm.
