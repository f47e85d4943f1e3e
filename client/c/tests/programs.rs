//! Compiles C programs against the library as users do, as C and as C++, and runs them.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails where it panics")]

use std::path::{Path, PathBuf};
use std::process::Command;

use farside_tests::cluster::TestCluster;
use farside_tests::{ServerProcess, free_tcp_address};
use tempfile::TempDir;

/// Runs a command, which must succeed. Returns its standard output.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (text, errors) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    String::from_utf8(text).unwrap()
}

/// Installs the library in a folder of its own, whose name has a space.
fn install() -> TempDir {
    let test_binary = std::env::current_exe().unwrap();
    let built = test_binary.ancestors().nth(2).unwrap();
    // `make test` builds everything first and sets this.
    if std::env::var_os("FARSIDE_BUILT").is_none() {
        run(Command::new(env!("CARGO")).args(["build", "--quiet", "--package=farside-c"]));
    }
    let folder =
        tempfile::Builder::new().prefix("c library").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
    let prefix = folder.unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("install.sh");
    run(Command::new(script).arg("--prefix").arg(prefix.path()).arg("--built").arg(built));
    prefix
}

/// Compiles a program with what pkg-config says.
fn compile(prefix: &Path, source: &str, compiler: &[&str], linked: &str) -> PathBuf {
    let pkg_config = |mode| {
        let mut command = Command::new("pkg-config");
        command.args([mode, "--cflags", "--libs", "farside"]);
        let words = run(command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")));
        shlex::split(&words).unwrap()
    };
    let program = prefix.join(format!("{}-{}-{linked}", source.replace('/', "-"), compiler[0]));
    let mut command = Command::new(compiler[0]);
    command.args(&compiler[1..]).args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic"]);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source));
    command.args(["-x", "none", "-o"]).arg(&program);
    if linked == "static" {
        // What pkg-config says, with the archive in the place of the shared library.
        command.arg(prefix.join("lib/libfarside.a"));
        let words = pkg_config("--static");
        command.args(words.into_iter().filter(|word| word != "-lfarside"));
    } else {
        command.args(pkg_config("--shared"));
        command.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    }
    run(&mut command);
    program
}

const C: [&str; 4] = ["cc", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-xc"];
const CPP: [&str; 3] = ["c++", "-std=c++17", "-xc++"];

const PROGRAMS: [(&str, &str); 4] = [
    ("examples/quickstart.c", "hello\nreplaced\n"),
    ("examples/event_loop.c", "1000 values stored and read\n"),
    ("examples/feature_store.c", "sum of the first features: 4950\n"),
    ("tests/functions.c", "all functions\n"),
];

/// Runs the program of each source on shared memory, over TCP, and with a cluster. With a launcher,
/// which is slow, they run on shared memory, and the one that calls all functions over TCP too.
fn run_all(compiler: &[&str], linked: &str, launcher: &[&str]) {
    let prefix = install();
    let tcp = free_tcp_address();
    let server = ServerProcess::start(&format!("--memory 64MiB --listen {tcp}"));
    let (_cluster, servers) = TestCluster::with_servers(2);
    for (source, expected) in PROGRAMS {
        let program = compile(prefix.path(), source, compiler, linked);
        let addresses = [server.address(), tcp.clone(), servers[0].address()];
        let count = match (launcher, source) {
            ([], _) => 3,
            (_, "tests/functions.c") => 2,
            _ => 1,
        };
        for address in addresses.into_iter().take(count) {
            let mut words = launcher.iter().map(std::ffi::OsString::from).collect::<Vec<_>>();
            words.extend([program.clone().into(), address.clone().into()]);
            let mut command = Command::new(&words[0]);
            assert_eq!(run(command.args(&words[1..])), expected, "{source} at {address}");
        }
    }
}

#[test]
fn programs_run_as_c() {
    run_all(&C, "shared", &[]);
}

#[test]
fn programs_run_as_cpp() {
    run_all(&CPP, "shared", &[]);
}

#[test]
fn programs_run_with_the_archive() {
    run_all(&C, "static", &[]);
}

#[test]
fn valgrind_finds_nothing() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return eprintln!("left out: no valgrind here");
    }
    let valgrind = [
        "valgrind",
        "--quiet",
        // A thread that waits for an answer would keep the one that receives it from running.
        "--fair-sched=yes",
        "--error-exitcode=9",
        "--leak-check=full",
        "--show-leak-kinds=definite,indirect",
        "--errors-for-leak-kinds=definite,indirect",
    ];
    run_all(&C, "shared", &valgrind);
}

#[test]
fn the_program_in_the_documents_compiles() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clients.md");
    let page = std::fs::read_to_string(page).unwrap();
    let program = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let prefix = install();
    let source = prefix.path().join("page.c");
    std::fs::write(&source, program).unwrap();
    compile(prefix.path(), source.to_str().unwrap(), &C, "shared");
}

/// Nothing else is visible, so that programs can have other Rust libraries, too.
#[test]
fn only_functions_of_the_header_are_visible() {
    let prefix = install();
    let header = std::fs::read_to_string(prefix.path().join("include/farside.h")).unwrap();
    let name = |line: &str| {
        let (before, _) = line.split_once('(')?;
        let start = before.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
        let is_function = !line.starts_with(['/', ' ', '#']) && before.contains("farside_");
        is_function.then(|| before[start + 1..].to_owned())
    };
    let mut declared: Vec<String> = header.lines().filter_map(name).collect();
    declared.sort();
    assert!(declared.len() > 40, "{declared:?}");
    for (file, flags) in [("lib/libfarside.so", "-D"), ("lib/libfarside.a", "-g")] {
        let mut nm = Command::new("nm");
        let path = prefix.path().join(file);
        let symbols = run(nm.args([flags, "--defined-only", "--format=just-symbols"]).arg(path));
        let mut symbols: Vec<&str> =
            symbols.lines().filter(|line| !line.is_empty() && !line.ends_with(':')).collect();
        symbols.sort_unstable();
        assert_eq!(symbols, declared, "{file}");
    }
}

#[test]
fn the_shared_library_has_a_versioned_name() {
    let prefix = install();
    let path = prefix.path().join("lib/libfarside.so.0.1");
    let dynamic = run(Command::new("readelf").arg("-d").arg(path));
    assert!(dynamic.contains("soname: [libfarside.so.0.1]"), "{dynamic}");
}
