//! A network whose TLS somebody inspects, with a CA that only the operator knows: what is installed inside
//! is installed all the same, without a word to the program that does it.

use std::path::Path;

use serde_json::json;
use torpor_e2e::{Internet, World};

const NAME: &str = "index.test";
/// A wheel and a package of Node with one word in each, made where their tools are.
const MAKE: &str = r#"
import json, os, tarfile, zipfile
os.chdir("/tmp")
wheel = zipfile.ZipFile("tiny-1.0-py3-none-any.whl", "w")
wheel.writestr("tiny.py", "word = 'from the wheel'\n")
wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
wheel.writestr("tiny-1.0.dist-info/RECORD", "")
wheel.close()
os.makedirs("package")
open("package/package.json", "w").write(json.dumps({"name": "tiny", "version": "1.0.0"}))
open("package/index.js", "w").write("module.exports = 'from the package'\n")
tarfile.open("tiny-1.0.0.tgz", "w:gz").add("package")
"#;
/// npm, as Node's own distribution has it: the image has none.
const NPM: &str = "/usr/lib/node_modules/npm";

/// The index of a package in both languages, for whoever asks for it by this name.
fn publish(internet: &Internet, world: &World, host: &str) {
    let fetched = |name: &str| {
        let here = world.path(name);
        world.torpor(&["cp", &format!("maker:/tmp/{name}"), here.to_str().unwrap()]).ok();
        std::fs::read(here).unwrap()
    };
    let wheel = "tiny-1.0-py3-none-any.whl";
    internet.publish(&format!("/files/{wheel}"), fetched(wheel));
    internet.publish("/files/tiny-1.0.0.tgz", fetched("tiny-1.0.0.tgz"));
    let link = format!("<a href=\"https://{host}/files/{wheel}\">{wheel}</a>");
    internet.publish("/simple/tiny/", link);
    let tarball = format!("https://{host}/files/tiny-1.0.0.tgz");
    let version = json!({"name": "tiny", "version": "1.0.0", "dist": {"tarball": tarball}});
    let about =
        json!({"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}});
    internet.publish("/npm/tiny", about.to_string());
}

fn indexes(host: &str) -> [(&'static str, String); 2] {
    [
        ("PIP_INDEX_URL", format!("https://{host}/simple/")),
        ("npm_config_registry", format!("https://{host}/npm/")),
    ]
}

/// A daemon whose operator says what the network is like, and the index in it.
fn inspected(internet: &Internet) -> World {
    let address = internet.address.to_string();
    let [pip, npm] = indexes(&address).map(|(name, url)| format!("{name}=\"{url}\""));
    let (ca, resolver) = (internet.roots(), internet.resolver());
    let world = World::with_env(&[
        ("TORPOR_GUEST_EXTRA_CA", &format!("[{ca:?}]")),
        ("TORPOR_GUEST_ENV", &format!("{{{pip},{npm}}}")),
        ("TORPOR_EGRESS_RESOLVER", &resolver),
    ]);
    world.create("maker");
    world.torpor(&["run", "maker", "--", "python3", "-c", MAKE]).ok();
    publish(internet, &world, &address);
    world
}

fn pip_installs(world: &World, sandbox: &str) {
    world.sh(sandbox, "pip install --disable-pip-version-check tiny").ok();
    let said = world.sh(sandbox, "python3 -c 'import tiny; print(tiny.word)'").ok();
    assert_eq!(said, "from the wheel\n");
}

#[test]
fn pip_installs_from_an_inspected_network_without_a_flag_also_after_sleep() {
    let internet = Internet::with(&[NAME]);
    let mut world = inspected(&internet);
    world.create("web");
    pip_installs(&world, "web");
    // One that was saved before the operator knew of the CA.
    world.stop_daemon();
    let ca = format!("[{:?}]", internet.roots());
    world.set_env("TORPOR_GUEST_EXTRA_CA", "[]");
    world.start_daemon();
    world.create("old");
    let refused = world.sh("old", "pip download --retries 0 tiny 1>&2").fails(1);
    assert!(refused.contains("CERTIFICATE_VERIFY_FAILED"), "{refused}");
    world.sleep("old", "cold");
    world.stop_daemon();
    world.set_env("TORPOR_GUEST_EXTRA_CA", &ca);
    world.start_daemon();
    pip_installs(&world, "old");
}

#[test]
fn npm_installs_from_an_inspected_network_without_a_flag() {
    if !Path::new(NPM).is_dir() {
        return torpor_testkit::not_here(format!("there is no npm in {NPM}"));
    }
    let internet = Internet::with(&[NAME]);
    let world = inspected(&internet);
    world.create("web");
    world.torpor(&["cp", NPM, "web:/opt/npm"]).ok();
    world.sh("web", "cd /tmp && node /opt/npm/bin/npm-cli.js install tiny").ok();
    let said = world.sh("web", "cd /tmp && node -p 'require(\"tiny\")'").ok();
    assert_eq!(said, "from the package\n");
}

#[test]
fn a_build_installs_from_an_inspected_network_without_a_flag() {
    let internet = Internet::with(&[NAME]);
    let world = inspected(&internet);
    let context = world.path("context");
    std::fs::create_dir(&context).unwrap();
    let file = "FROM torpor/base\nRUN pip install --disable-pip-version-check tiny\n";
    std::fs::write(context.join("Dockerfile"), file).unwrap();
    world.torpor(&["image", "build", context.to_str().unwrap(), "--name", "tiny"]).ok();
    world.create_with("web", &["--image", "tiny"]);
    let said = world.sh("web", "python3 -c 'import tiny; print(tiny.word)'").ok();
    assert_eq!(said, "from the wheel\n");
}

#[test]
fn intercepted_requests_pass_an_inspected_network_too_and_a_sandbox_says_more_than_its_host() {
    let internet = Internet::with(&[NAME]);
    let world = inspected(&internet);
    publish(&internet, &world, NAME);
    let [pip, _] = indexes(NAME).map(|(name, url)| format!("{name}={url}"));
    world.create_with("web", &["--allow", &format!("GET {NAME}/"), "--env", &pip]);
    pip_installs(&world, "web");
    let asked = world.torpor(&["egress", "ls", "web"]).ok();
    assert!(asked.contains("/simple/tiny/"), "it was intercepted: {asked}");
}
