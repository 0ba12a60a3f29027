//! cp, ls and cat.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use crate::world::World;

#[test]
fn a_file_goes_in_and_comes_back() {
    let world = World::with_sandbox();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n * 7 % 256) as u8).collect();
    fs::write(world.here.join("a.bin"), &bytes).unwrap();
    fs::set_permissions(world.here.join("a.bin"), fs::Permissions::from_mode(0o750)).unwrap();
    world.torpor(["cp", "a.bin", &world.web("b.bin")]).ok();
    let inside = world.inside.join("b.bin");
    assert!(fs::read(&inside).unwrap() == bytes);
    assert_eq!(fs::metadata(&inside).unwrap().permissions().mode() & 0o777, 0o750);
    world.torpor(["cp", &world.web("b.bin"), "c.bin"]).ok();
    assert!(fs::read(world.here.join("c.bin")).unwrap() == bytes);
    let mode = fs::metadata(world.here.join("c.bin")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o750);
}

#[test]
fn a_directory_goes_in_and_comes_back() {
    let world = World::with_sandbox();
    let tree = world.here.join("tree");
    fs::create_dir_all(tree.join("deep/empty")).unwrap();
    fs::write(tree.join("deep/a"), "one").unwrap();
    fs::write(tree.join("b"), "two").unwrap();
    symlink("b", tree.join("link")).unwrap();
    world.torpor(["cp", "tree", &world.web("copy")]).ok();
    assert_eq!(fs::read_to_string(world.inside.join("copy/deep/a")).unwrap(), "one");
    world.torpor(["cp", &world.web("copy"), "back"]).ok();
    let back = world.here.join("back");
    assert_eq!(fs::read_to_string(back.join("deep/a")).unwrap(), "one");
    assert_eq!(fs::read_link(back.join("link")).unwrap().to_str(), Some("b"));
    assert!(back.join("deep/empty").is_dir());
}

#[test]
fn a_directory_that_exists_takes_the_directory_or_its_content() {
    let world = World::with_sandbox();
    fs::create_dir(world.here.join("src")).unwrap();
    fs::write(world.here.join("src/a"), "x").unwrap();
    fs::create_dir(world.inside.join("app")).unwrap();
    world.torpor(["cp", "src", &world.web("app")]).ok();
    assert!(world.inside.join("app/src/a").exists());
    world.torpor(["cp", "src/.", &world.web("app")]).ok();
    assert!(world.inside.join("app/a").exists());
    fs::create_dir(world.here.join("out")).unwrap();
    world.torpor(["cp", &world.web("app"), "out"]).ok();
    assert!(world.here.join("out/app/src/a").exists());
    world.torpor(["cp", &world.web("app/."), "out"]).ok();
    assert!(world.here.join("out/src/a").exists());
    world.torpor(["cp", "src/a", &world.web("app/")]).ok();
    world.torpor(["cp", &world.web("app/a"), "out/"]).ok();
    assert!(world.here.join("out/a").exists());
}

#[test]
fn a_directory_does_not_replace_a_file() {
    let world = World::with_sandbox();
    fs::create_dir(world.here.join("src")).unwrap();
    fs::write(world.inside.join("file"), "precious").unwrap();
    let (code, words) = world.torpor(["cp", "src", &world.web("file")]).failed();
    assert_eq!(code, 1);
    assert!(words.starts_with("error: can't copy a directory onto the file "), "{words}");
    assert_eq!(fs::read_to_string(world.inside.join("file")).unwrap(), "precious");
}

#[test]
fn a_missing_file_is_an_error_on_either_side() {
    let world = World::with_sandbox();
    let (code, words) = world.torpor(["cp", "nothing", &world.web("x")]).failed();
    assert_eq!(code, 1);
    assert_eq!(
        words,
        "error: can't read nothing\ncaused by: No such file or directory (os error 2)\n"
    );
    let (code, words) = world.torpor(["cp", &world.web("nothing"), "x"]).failed();
    assert_eq!(code, 1);
    assert!(words.starts_with("error: ") && words.contains("nothing"), "{words}");
    assert!(!world.here.join("x").exists());
}

#[test]
fn dash_is_standard_input_and_output() {
    let world = World::with_sandbox();
    world.torpor_with(["cp", "-", &world.web("note")], b"from a pipe").ok();
    assert_eq!(world.torpor(["cp", &world.web("note"), "-"]).ok(), "from a pipe");
    assert_eq!(world.torpor(["cat", &world.web("note")]).ok(), "from a pipe");
}

#[test]
fn a_link_inside_cannot_steer_what_is_written_here() {
    let world = World::with_sandbox();
    fs::create_dir(world.inside.join("trap")).unwrap();
    fs::create_dir(world.here.join("precious")).unwrap();
    // The user has a link of the same name as a directory inside.
    fs::create_dir(world.here.join("out")).unwrap();
    symlink(world.here.join("precious"), world.here.join("out/x")).unwrap();
    fs::create_dir(world.inside.join("trap/x")).unwrap();
    fs::write(world.inside.join("trap/x/owned"), "").unwrap();
    let (code, words) = world.torpor(["cp", &world.web("trap/."), "out"]).failed();
    assert_eq!(code, 1);
    assert!(words.contains("links are not followed"), "{words}");
    assert_eq!(fs::read_dir(world.here.join("precious")).unwrap().count(), 0);
}

#[test]
fn one_side_has_to_be_here_and_one_in_a_sandbox() {
    let world = World::with_sandbox();
    let (code, words) = world.torpor(["cp", "web:/a", "web:/b"]).failed();
    assert_eq!((code, words.lines().next()), (2, Some("error: one side has to be here")));
    let (code, words) = world.torpor(["cp", "a", "b"]).failed();
    assert_eq!((code, words.lines().next()), (2, Some("error: neither side is in a sandbox")));
}

#[test]
fn ls_lists_a_directory() {
    let world = World::with_sandbox();
    fs::write(world.inside.join("a"), "12345").unwrap();
    symlink("a", world.inside.join("l")).unwrap();
    let table = world.torpor(["ls", &world.web("")]).ok();
    let rows: Vec<Vec<&str>> =
        table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["KIND", "MODE", "OWNER", "SIZE", "MODIFIED", "PATH"]);
    assert_eq!((rows[1][0], rows[1][3], rows[1][4]), ("file", "5", "B"));
    assert!(table.lines().nth(2).unwrap().ends_with("l -> a"), "{table}");
    assert_eq!(world.torpor(["ls", "--json", &world.web("")]).json()["entries"][0]["size"], 5);
}
