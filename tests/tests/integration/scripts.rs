//! Proves that `make demo` succeeds although other programs change the tree of files while it runs.
//! A stub for cargo changes the tree when the demo builds. Also proves how `make deny` checks
//! advisories, with a stub for cargo that only records its calls. Without a database the script
//! says so, and succeeds. With one it fails if the check finds something.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use farside_tests::binary;

// On shared memory only: the demo uses shared memory.
#[on(shm)]
fn the_demo_does_not_mind_a_tree_that_changes() {
    let folder = tempfile::tempdir().unwrap();
    let [tree, target, programs] = ["tree", "target", "programs"].map(|name| {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    });
    for name in ["stays", "grows", "goes"] {
        fs::write(tree.join(name), name).unwrap();
    }
    symlink(binary("kv-server").parent().unwrap(), target.join("demo")).unwrap();
    ["kv-cli", "kv-bench"].into_iter().for_each(|name| drop(binary(name)));
    let metadata = r#"echo "\"target_directory\":\"$TARGET\""; exit"#;
    let stub = "#!/bin/sh\n\
                if [ \"$1\" = metadata ]; then METADATA; fi\n\
                rm \"$DIR/goes\"; echo more >>\"$DIR/grows\"; echo new >\"$DIR/comes\"\n";
    let cargo = programs.join("cargo");
    fs::write(&cargo, stub.replace("METADATA", metadata)).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/scripts/demo.sh");
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let mut demo = Command::new("bash");
    demo.arg(script).env("PATH", path).env("DIR", &tree).env("TARGET", &target);
    demo.env("TMPDIR", folder.path()).stdin(Stdio::null());
    let output = demo.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}\n{errors}");
    assert!(stdout.contains("Yes: 3 files"), "{stdout}");
    assert!(tree.join("comes").exists(), "the stub was not called");
    let files_left = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files_left, 3, "the demo left files behind");
}

/// With it the four commands have several times the bytes.
#[on(shm)]
fn installed_commands_have_no_debug_information() {
    let folder = tempfile::tempdir().unwrap();
    let commands = ["kv-server", "kv-cli", "kv-resp", "kv-bench"];
    let built = commands.map(binary);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/scripts/install.sh");
    let mut install = Command::new("bash");
    install.arg(script).arg("--prefix").arg(folder.path()).arg("--built");
    let output = install.arg(built[0].parent().unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // A build has a table of symbols even where the environment leaves debug information out.
    let has_symbols = |path: &Path| {
        let program = fs::read(path).unwrap();
        program.windows(8).any(|name| name == b"\0.symtab")
    };
    for (name, built) in commands.iter().zip(&built) {
        let installed = folder.path().join("bin").join(name);
        assert!(has_symbols(built) && !has_symbols(&installed), "{name}");
        let version = Command::new(&installed).arg("--version").output().unwrap();
        assert!(version.stdout.starts_with(name.as_bytes()), "{name}");
        let page =
            fs::read_to_string(folder.path().join("share/man/man1").join(format!("{name}.1")));
        assert!(page.unwrap().contains(".SH SYNOPSIS"), "{name}");
    }
}

/// Runs the script; returns its exit code, its stderr, and the calls of `cargo deny`.
fn deny(
    can_fetch: bool,
    has_database: bool,
    has_findings: bool,
) -> (Option<i32>, String, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let (cargo, calls) = (folder.path().join("cargo"), folder.path().join("calls"));
    let code = |is_fine: bool| u8::from(!is_fine);
    let script = format!(
        "#!/bin/sh\necho \"$*\" >>{}\ncase $* in\n*fetch\\ db) exit {} ;;\n\
         *advisories) exit {} ;;\nesac\n",
        calls.display(),
        code(can_fetch),
        code(!has_findings),
    );
    std::fs::write(&cargo, script).unwrap();
    std::fs::set_permissions(&cargo, PermissionsExt::from_mode(0o755)).unwrap();
    let databases = folder.path().join("advisory-dbs");
    std::fs::create_dir(&databases).unwrap();
    std::fs::write(databases.join("db.lock"), "").unwrap();
    if has_database {
        std::fs::create_dir(databases.join("advisory-db-3157b0e258782691")).unwrap();
    }
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let output = Command::new(top.join("tools/scripts/deny.sh"))
        .env("PATH", path)
        .env("CARGO_HOME", folder.path())
        .output()
        .unwrap();
    let calls = std::fs::read_to_string(calls).unwrap().lines().map(str::to_owned).collect();
    (output.status.code(), String::from_utf8(output.stderr).unwrap(), calls)
}

#[on(shm)]
fn advisories_are_checked_if_a_database_is_available() {
    const CHECKED: &str = "deny --offline check advisories";
    let (code, said, calls) = deny(false, false, true);
    assert_eq!((code, calls.contains(&CHECKED.to_owned())), (Some(0), false));
    assert!(said.contains("advisories were not checked"), "{said}");
    assert_eq!(calls[0], "deny check bans licenses sources");
    let (code, said, calls) = deny(false, true, false);
    assert_eq!((code, calls.last().unwrap().as_str()), (Some(0), CHECKED));
    assert!(said.contains("the local one"), "{said}");
    for has_findings in [false, true] {
        let (code, said, calls) = deny(true, false, has_findings);
        assert_eq!((code, calls.last().unwrap().as_str()), (Some(has_findings.into()), CHECKED));
        assert!(said.is_empty(), "{said}");
    }
}
