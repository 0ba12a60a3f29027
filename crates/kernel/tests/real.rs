//! Fetches this machine's real kernel, where there is an apt that knows one and a network.

#![expect(clippy::unwrap_used, reason = "a test that fails says where")]

use std::path::Path;
use std::time::Duration;

use torpor_kernel::{KernelError, fetch, initramfs, list, newest, remove};

/// A download is far quicker, or it is not what this test is about.
const PATIENCE: Duration = Duration::from_secs(18);

#[test]
fn the_distributions_kernel_is_fetched_prepared_and_not_fetched_twice() {
    let dir = tempfile::tempdir().unwrap();
    let kernels = dir.path().join("kernels");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(check(&kernels));
    // Waits for a preparation that was given up, which would bring the directory back.
    drop(runtime);
}

async fn check(kernels: &Path) {
    let mut told = Vec::new();
    let mut tell = |text: &str| told.push(text.to_owned());
    let fetched = tokio::time::timeout(PATIENCE, fetch(kernels, &mut tell)).await;
    let kernel = match fetched {
        Ok(Ok(kernel)) => kernel,
        Ok(Err(error @ (KernelError::NoSource(_) | KernelError::Failed { .. }))) => {
            return skip(&error.to_string());
        }
        Err(_) => return skip("the network is too slow"),
        Ok(Err(error)) => panic!("{error}"),
    };
    assert!(told.iter().any(|text| text.starts_with("downloading linux-image-")), "{told:?}");
    assert_eq!(newest(kernels).unwrap(), kernel);
    for name in ["virtio_mmio", "virtio_blk", "virtio_net", "erofs", "overlay"] {
        let file = format!("-{name}.ko");
        let mut names = kernel.modules.iter().map(|path| path.to_string_lossy());
        assert!(names.any(|path| path.ends_with(&file)), "{name}: {:?}", kernel.modules);
    }
    let archive = initramfs(&kernel, b"program").unwrap();
    assert!((1 << 20..32 << 20).contains(&archive.len()), "{}", archive.len());

    told.clear();
    let mut tell = |text: &str| told.push(text.to_owned());
    assert_eq!(fetch(kernels, &mut tell).await.unwrap(), kernel);
    assert!(!told.iter().any(|text| text.contains("downloading")), "{told:?}");

    remove(kernels, &kernel.release).unwrap();
    assert_eq!(list(kernels).unwrap(), []);
}

fn skip(why: &str) {
    torpor_testkit::missing(format!("no kernel can be fetched here: {why}"));
}
