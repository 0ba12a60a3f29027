//! Tells cargo that the migrations are part of the program: they are embedded by `sqlx::migrate!`.

fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
