//! Gives the shared library its SONAME. Before version 1 the second number tells incompatible
//! libraries apart.

fn main() {
    let number = |name| std::env::var(name).unwrap_or_default();
    let (major, minor) = (number("CARGO_PKG_VERSION_MAJOR"), number("CARGO_PKG_VERSION_MINOR"));
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfarside.so.{major}.{minor}");
    // Threads of the library may still run when a program unloads it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
