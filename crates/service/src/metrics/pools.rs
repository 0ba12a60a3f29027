//! Numbers of pools of machines that wait.

use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use torpor_protocol::snapshot::Pool;

use super::number;

/// A pool is made by hand, so there are few.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabels {
    pool: String,
}

/// What pools say of themselves.
#[derive(Default)]
pub(super) struct Pools {
    ready: Family<PoolLabels, Gauge>,
    hits: Family<PoolLabels, Counter>,
    misses: Family<PoolLabels, Counter>,
}

impl Pools {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("pool_ready", "Machines that wait in a pool", self.ready.clone());
        registry.register("pool_hits", "Sandboxes taken from a pool", self.hits.clone());
        registry.register("pool_misses", "Sandboxes that found it empty", self.misses.clone());
    }

    pub(super) fn set(&self, pools: &[Pool]) {
        self.ready.clear();
        self.hits.clear();
        self.misses.clear();
        for pool in pools {
            let labels = PoolLabels { pool: pool.name.to_string() };
            self.ready.get_or_create(&labels).set(number(pool.ready));
            self.hits.get_or_create(&labels).inner().store(pool.hits, Ordering::Relaxed);
            self.misses.get_or_create(&labels).inner().store(pool.misses, Ordering::Relaxed);
        }
    }
}
