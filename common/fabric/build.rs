//! Says in one line what a build with RDMA lacks. Cargo may come to rdma-sys first, where bindgen
//! says it in a hundred, and then stop; with `--keep-going` it comes here, too.

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
    // Without the variable, the newest libclang would be taken, which is too new in most places.
    let has_clang = std::env::var_os("LIBCLANG_PATH").is_some();
    if !(has_headers && has_clang) {
        let what = if has_headers { "LIBCLANG_PATH (libclang 10 to 15)" } else { "RDMA's headers" };
        println!(
            "cargo::error=a build with RDMA needs {what}: `make build` installs and sets what it \
             takes; or build without RDMA: --no-default-features"
        );
    }
}
