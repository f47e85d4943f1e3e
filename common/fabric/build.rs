//! Reports in one line what a build with RDMA lacks. If Cargo builds rdma-sys first, bindgen ends
//! the build with a hundred lines. With `--keep-going` this script runs, too.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    if std::env::var_os("CARGO_FEATURE_VERBS").is_none() {
        return;
    }
    let libraries = ["libibverbs", "librdmacm"];
    let has_headers = Command::new("pkg-config")
        .arg("--exists")
        .args(libraries)
        .status()
        .is_ok_and(|status| status.success());
    // Without the variable, bindgen uses the newest libclang, which is too new on most machines.
    let has_clang = std::env::var_os("LIBCLANG_PATH").is_some();
    if !(has_headers && has_clang) {
        let what = if has_headers { "LIBCLANG_PATH (libclang 10 to 15)" } else { "RDMA's headers" };
        println!(
            "cargo::error=a build with RDMA needs {what}: `make build` installs and sets what it \
             takes; or build without RDMA: --no-default-features"
        );
    }
}
