//! Bodies of the native HTTP API, `/v1`.
//!
//! Byte streams (files, tars, stdin) are raw bodies and not described here. Output of a running
//! command is NDJSON: one [`RunEvent`] a line.

use serde::{Deserialize, Serialize};

use crate::guest::{self, RestartPolicy};
use crate::id::{ImageId, Name};
use crate::spec::{Lifetime, Network, Pairs};
use crate::status::Status;
