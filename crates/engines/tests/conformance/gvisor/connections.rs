//! What becomes of connections to the outside when a machine is saved.

use super::freezes;
use crate::outside::Outside;
use crate::world::{boot, revive, stage, world};

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_to_the_outside_does_not_outlive_a_revival_and_new_ones_can_be_made() {
    let Some(world) = world().await else { return };
    let (plan, outside) = (world.plan(), Outside::new(&world));
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    outside.connect(&guest).await;
    machine.save(stage().path()).await.unwrap();
    // Builds of 2026 keep the connections of a machine that goes on.
    if freezes().await {
        let closed = outside.end(&guest).await;
        assert!(closed.contains("Software caused connection abort"), "reading: {closed}");
        assert!(closed.contains("Broken pipe"), "writing: {closed}");
    } else {
        assert!(outside.still_open());
    }

    outside.connect(&guest).await;
    let save = stage();
    machine.pause().await.unwrap();
    machine.save(save.path()).await.unwrap();
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    let closed = outside.end_inside(&guest).await;
    assert!(closed.contains("Broken pipe"), "writing: {closed}");
    outside.connect(&guest).await;
    machine.kill().await.unwrap();
}
