//! Proves that `make demo` succeeds although other programs change the tree of files while it runs.
//! A stub for cargo changes the tree when the demo builds.

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
