//! Tells cargo that the migrations are part of the program: they are embedded by `sqlx::migrate!`.

#[expect(clippy::print_stdout, reason = "this is how a build script talks to cargo")]
fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
