//! Versions and directories as QEMUs tell them, and programs that are none.

use std::os::unix::fs::PermissionsExt;

use super::*;

#[test]
fn a_version_is_found_in_what_qemu_says() {
    let known = [
        ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright", (10, 0, 2)),
        ("QEMU emulator version 9.2.0\n", (9, 2, 0)),
        ("QEMU emulator version 11.0.0-rc1", (11, 0, 0)),
        ("QEMU emulator version 10.1.92 (v10.2.0-rc2)", (10, 1, 92)),
    ];
    for (said, version) in known {
        assert_eq!(parse_version(said).unwrap().0, version, "{said}");
    }
    for said in ["", "QEMU emulator version ", "runsc version 10.0.2", "QEMU emulator version x.y"]
    {
        assert_eq!(parse_version(said), None, "{said}");
    }
}

#[test]
fn what_the_linker_says_becomes_a_list_of_files() {
    let said = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibm.so.6 => /lib/libm.so.6 (0x00007f01)\n\
                \tlibm.so.6 => /lib/libm.so.6 (0x00007f01)\n\t/lib64/ld-linux.so.2 (0x00007f02)\n";
    let paths = ["/lib/libm.so.6", "/lib64/ld-linux.so.2"].map(PathBuf::from);
    assert_eq!(parse_libraries(said).unwrap(), paths);
    assert_eq!(parse_libraries("\tlibx.so => not found\n").unwrap_err(), "libx.so");
    // A program without libraries answers the question itself.
    assert_eq!(parse_libraries("QEMU emulator version 10.0.2 (static)\n").unwrap().len(), 0);
}

/// A QEMU that answers `--version` with `version`, lists `machines` and looks for firmware in its
/// own directory.
fn qemu(directory: &Path, version: &str, machines: &str) -> PathBuf {
    let program = directory.join("qemu");
    let text = format!(
        "#!/bin/sh\ncase $1 in\n--version) echo QEMU emulator version '{version}';;\n\
         -machine) printf '{machines}';;\n-L) echo {};;\nesac\n",
        directory.display()
    );
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    program
}

const MACHINES: &str = "Supported machines are:\\nmicrovm   microvm (i386)\\n";

#[tokio::test]
async fn a_qemu_that_is_missing_or_corrupts_guests_is_refused_with_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let nowhere = directory.path().join("nowhere");
    let error = Build::find(Some(&nowhere), Accel::Tcg).await.unwrap_err().to_string();
    assert!(error.contains("bookworm-backports"), "{error}");

    let program = qemu(directory.path(), "7.2.22 (Debian 1:7.2+dfsg-7)", MACHINES);
    let error = Build::find(Some(&program), Accel::Kvm).await.unwrap_err().to_string();
    assert!(error.contains("7.2.22") && error.contains("corrupt"), "{error}");
    assert!(error.contains("bookworm-backports"), "{error}");
}

#[tokio::test]
async fn a_qemu_without_the_machine_or_the_firmware_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let program = qemu(directory.path(), "10.0.2", "Supported machines are:\\nq35  pc\\n");
    let error = Build::find(Some(&program), Accel::Tcg).await.unwrap_err().to_string();
    assert!(error.contains("no machine type microvm"), "{error}");

    let program = qemu(directory.path(), "10.0.2", MACHINES);
    let error = Build::find(Some(&program), Accel::Tcg).await.unwrap_err().to_string();
    assert!(error.contains("qboot.rom") && error.contains("qemu-system-data"), "{error}");

    std::fs::write(directory.path().join(FIRMWARE), b"rom").unwrap();
    let build = Build::find(Some(&program), Accel::Kvm).await.unwrap();
    assert_eq!(build.firmware, directory.path().join(FIRMWARE));
    assert_eq!((build.version, build.text.as_str()), ((10, 0, 2), "10.0.2"));
    assert_eq!(build.tick_khz, None, "KVM tells its guests itself");
}

#[tokio::test]
async fn a_qemu_that_aborts_with_kvm_is_refused_for_it_and_emulates_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(FIRMWARE), b"rom").unwrap();
    let program = qemu(directory.path(), "10.0.2", MACHINES);
    let mut text = std::fs::read_to_string(&program).unwrap();
    text.push_str("case \"$*\" in *'-accel kvm'*) echo 'error: failed to set MSR' >&2; kill -ABRT $$;; esac\n");
    std::fs::write(&program, text).unwrap();
    let error = Build::find(Some(&program), Accel::Kvm).await.unwrap_err().to_string();
    for part in ["does not start with KVM", "failed to set MSR", "gVisor"] {
        assert!(error.contains(part), "{error} does not say {part}");
    }
    assert!(Build::find(Some(&program), Accel::Tcg).await.is_ok());
}

#[test]
fn the_trimmed_build_is_taken_for_kvm_only() {
    let directory = tempfile::tempdir().unwrap();
    for name in [FULL, TRIMMED] {
        std::fs::write(directory.path().join(name), b"").unwrap();
    }
    let places = [directory.path().to_owned()];
    assert_eq!(best(Accel::Kvm, &places), directory.path().join(TRIMMED));
    assert_eq!(best(Accel::Tcg, &places), directory.path().join(FULL));
    std::fs::remove_file(directory.path().join(TRIMMED)).unwrap();
    assert_eq!(best(Accel::Kvm, &places), directory.path().join(FULL));
}
