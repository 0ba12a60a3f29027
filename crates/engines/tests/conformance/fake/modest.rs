//! An engine that can do no more than it must: what the suite asks of the abilities of all engines is
//! answered here with refusals.

use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use torpor_lifecycle::engine::{
    Abilities, About, BootPlan, Channel, Engine, EngineError, Machine, Meter,
};
use torpor_protocol::SandboxId;

use crate::contract::is_as_it_says;
use crate::world::world;

struct Modest {
    about: About,
    fake: Arc<dyn Engine>,
}

struct ModestMachine {
    about: About,
    fake: Box<dyn Machine>,
}

#[async_trait]
impl Engine for Modest {
    fn about(&self) -> &About {
        &self.about
    }

    async fn boot(&self, plan: BootPlan) -> Result<Box<dyn Machine>, EngineError> {
        let fake = self.fake.boot(plan).await?;
        Ok(Box::new(ModestMachine { about: self.about.clone(), fake }))
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Machine>>, EngineError> {
        self.fake.adopt(id).await
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<usize, EngineError> {
        self.fake.sweep(keep).await
    }

    async fn close(&self) {
        self.fake.close().await;
    }
}

#[async_trait]
impl Machine for ModestMachine {
    fn channel(&self) -> Arc<dyn Channel> {
        self.fake.channel()
    }

    fn meter(&self) -> Arc<dyn Meter> {
        self.fake.meter()
    }

    async fn pause(&mut self) -> Result<(), EngineError> {
        Err(self.about.cant("pause a machine"))
    }

    async fn resume(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    fn paused(&self) -> bool {
        false
    }

    async fn exited(&mut self) -> String {
        self.fake.exited().await
    }

    async fn kill(self: Box<Self>) -> Result<(), EngineError> {
        self.fake.kill().await
    }
}

#[tokio::test]
async fn an_engine_that_can_nothing_says_so_and_refuses_it() {
    let Some(mut world) = world().await else { return };
    let abilities = Abilities::default();
    let about = About { kind: "modest", abilities, ..world.engine().about().clone() };
    world.replace(|fake| Arc::new(Modest { about, fake }));
    is_as_it_says(&world).await;
}
