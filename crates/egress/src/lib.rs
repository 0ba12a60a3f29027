//! What sandboxes send out: decided, read where a policy says so, given secrets, and told.
//!
//! ```text
//!  guest ─▶ slot ─▶ turnstile ─▶ glance: first bytes ─▶ policy ─┬─▶ pass on, unread ─▶ way out ─▶ world
//!             │                                                 └─▶ read: TLS ends here, secrets go in ─▶ …
//!             └──▶ names: our own name server, which remembers what it answered to whom
//! ```
//!
//! Invariants
//! - Nothing is dialed but what was resolved here for the host that the policy decided about.
//! - Deny wins. What can't be attributed to a host is refused where hosts are what matters, unless an
//!   explicit range of addresses allows it.
//! - A secret goes to the hosts it is bound to and nowhere else; its value is in no event, log or error.
//! - Without this crate running, guided sandboxes reach nothing: the turnstile is then closed.
