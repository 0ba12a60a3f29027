//! The default image, really built. Slow, so it is built once and kept in TORPOR_TEST_CACHE if that
//! is set; a kept one is used as long as the recipe is the same.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use torpor_lifecycle::store::Images as _;
use torpor_store::images::BASE_NAME;
use torpor_store::{Limits, Progress, Step};

use crate::world::{AGENT, World, facts};

/// What must be in the image for an agent to feel at home.
const PROGRAMS: [&str; 9] =
    ["bash", "python3", "python", "pip", "node", "git", "curl", "sudo", "ps"];

#[tokio::test(flavor = "multi_thread")]
async fn the_default_image_has_what_agents_need() {
    let cache = std::env::var_os("TORPOR_TEST_CACHE").map(PathBuf::from);
    let temporary = tempfile::tempdir().unwrap();
    let dir = cache.unwrap_or_else(|| temporary.path().to_owned()).join("base-image");
    let world = World::open(&dir, AGENT, Limits::default()).await.unwrap();
    let told: Arc<Mutex<Vec<Progress>>> = Arc::default();
    let listener = told.clone();
    let started = tokio::time::Instant::now();
    let image = world.images.ensure_base(Arc::new(move |p| listener.lock().push(p))).await.unwrap();
    println!("ensure_base: {:?}, {} bytes", started.elapsed(), image.size_bytes);

    if !told.lock().is_empty() {
        let steps = [Step::Downloading, Step::Installing, Step::Unpacking, Step::Packing];
        for step in steps {
            assert!(told.lock().iter().any(|progress| progress.step == step), "{step:?}");
        }
    }
    assert_eq!(image.names, [format!("{BASE_NAME}:latest")]);
    assert_eq!(image.config.workdir.as_deref(), Some("/workspace"));
    let root = world.images.root(&image.id).await.unwrap();
    assert_eq!(root.user.as_deref(), Some("root"));

    let tree = world.extract(&image.id).await;
    let tree = tree.path();
    for program in PROGRAMS {
        assert!(tree.join("usr/bin").join(program).symlink_metadata().is_ok(), "{program}");
    }
    assert_eq!(facts(&tree.join("workspace")).0, 0o777);
    assert_eq!(facts(&tree.join("home/tl-user")).1, 1000);
    assert_eq!(facts(&tree.join("etc/sudoers.d/tl-user")).0, 0o440);
    assert_eq!(std::fs::read(tree.join(".torpor/agent")).unwrap(), AGENT);
    assert!(std::fs::read_to_string(tree.join("etc/apt/sources.list")).unwrap().contains("deb "));
    assert!(!tree.join("etc/apt/apt.conf.d/99mmdebstrap").exists());
    assert!(
        std::fs::read_dir(tree.join("usr/lib/python3.11")).is_err() || {
            !tree.join("usr/lib/python3.11/EXTERNALLY-MANAGED").exists()
        }
    );
    assert!(std::fs::read(tree.join("etc/machine-id")).unwrap().is_empty());
    assert_eq!(std::fs::read_dir(tree.join("dev")).unwrap().count(), 0);

    // The second time there is nothing to do.
    let again = world.images.ensure_base(Arc::new(|_| panic!("built twice"))).await.unwrap();
    assert_eq!(again.id, image.id);
}
