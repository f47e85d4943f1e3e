//! Proves how `make deny` checks advisories, with a stub for cargo that only records its calls.
//! Without a database the script says so, and succeeds. With one it fails if the check finds
//! something.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

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
