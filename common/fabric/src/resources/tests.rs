//! Proves that the limits of cgroups are found, in folders of files that stand for those of the
//! kernel. Guards against a look at the host's memory from a container.

use tempfile::TempDir;

use super::*;

/// A folder with these files, of which `process` stands for `/proc/self`, and `cgroups` for
/// `/sys/fs/cgroup`.
fn machine(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let folder = folder.path().to_str().unwrap();
        fs::write(path, content.replace("CGROUPS", &format!("{folder}/cgroups"))).unwrap();
    }
    folder
}

fn rooms(machine: &TempDir) -> [Option<(u64, String)>; 2] {
    let process = machine.path().join("process");
    [memory_room_of(&process), threads_room_of(&process)].map(|room| {
        let Room { left, limit } = room?;
        Some((left, limit.strip_prefix(machine.path()).unwrap().to_str().unwrap().to_owned()))
    })
}

#[test]
fn the_least_limit_on_the_path_counts() {
    let machine = machine(&[
        ("process/cgroup", "0::/pod/container/worker\n"),
        ("process/mountinfo", "31 23 0:28 / CGROUPS rw,relatime - cgroup2 cgroup2 rw\n"),
        ("cgroups/pod/memory.max", "1000\n"),
        ("cgroups/pod/memory.current", "700\n"),
        ("cgroups/pod/memory.stat", "anon 500\ninactive_file 150\nactive_file 50\nfile 999\n"),
        ("cgroups/pod/pids.max", "max\n"),
        ("cgroups/pod/pids.current", "7\n"),
        ("cgroups/pod/container/memory.max", "max\n"),
        ("cgroups/pod/container/memory.current", "600\n"),
        ("cgroups/pod/container/pids.max", "10\n"),
        ("cgroups/pod/container/pids.current", "7\n"),
        ("cgroups/pod/container/worker/memory.max", "5000\n"),
        ("cgroups/pod/container/worker/memory.current", "600\n"),
    ]);
    // 1000 - (700 - 150 - 50)
    let memory = Some((500, "cgroups/pod/memory.max".into()));
    assert_eq!(rooms(&machine), [memory, Some((3, "cgroups/pod/container/pids.max".into()))]);
}

#[test]
fn version_1_has_a_mount_for_each_controller() {
    let machine = machine(&[
        ("process/cgroup", "9:name=systemd:/\n8:pids:/\n4:memory,hugetlb:/docker/1f\n0::/\n"),
        (
            "process/mountinfo",
            "30 23 0:30 / CGROUPS/cpu rw - cgroup cgroup rw,cpu\n\
             31 23 0:28 /docker/1f CGROUPS/memory rw shared:9 - cgroup cgroup rw,hugetlb,memory\n\
             32 23 0:29 / CGROUPS/unified rw - cgroup2 cgroup2 rw\n",
        ),
        // The mount shows the container's own cgroup as its root.
        ("cgroups/memory/memory.limit_in_bytes", "1000\n"),
        ("cgroups/memory/memory.usage_in_bytes", "400\n"),
        ("cgroups/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 100\n"),
    ]);
    let memory = Some((700, "cgroups/memory/memory.limit_in_bytes".into()));
    assert_eq!(rooms(&machine), [memory, None]);
}

#[test]
fn without_limits_there_is_no_room_to_tell() {
    let unlimited = machine(&[
        ("process/cgroup", "4:memory:/\n"),
        ("process/mountinfo", "31 23 0:28 / CGROUPS rw - cgroup cgroup rw,memory\n"),
        ("cgroups/memory.limit_in_bytes", "9223372036854771712\n"),
        ("cgroups/memory.usage_in_bytes", "400\n"),
    ]);
    assert_eq!(rooms(&unlimited), [None, None]);
    for (cgroup, mounts) in [
        ("", ""),
        ("0::/a/../../b\n0:\nx:y\n", "1 2 3 - cgroup2\n - \n1 2 0:1 / /nowhere rw - cgroup2 a b\n"),
        ("4:memory:relative\n", "31 23 0:28 / /nowhere rw - cgroup\n"),
    ] {
        let broken = machine(&[("process/cgroup", cgroup), ("process/mountinfo", mounts)]);
        assert_eq!(rooms(&broken), [None, None]);
    }
    assert_eq!(rooms(&machine(&[])), [None, None]);
}

#[test]
fn more_in_use_than_allowed_leaves_nothing() {
    let machine = machine(&[
        ("process/cgroup", "0::/\n"),
        ("process/mountinfo", "31 23 0:28 / CGROUPS rw - cgroup2 cgroup2 rw\n"),
        ("cgroups/memory.max", "1000\n"),
        ("cgroups/memory.current", "1400\n"),
    ]);
    assert_eq!(rooms(&machine), [Some((0, "cgroups/memory.max".into())), None]);
}

#[test]
fn meminfo_is_parsed() {
    let meminfo = Meminfo("MemFree: 1 kB\nMemAvailable:    12 kB\nHugePages_Free:   3\n".into());
    assert_eq!(meminfo.bytes("MemAvailable"), Some(12 << 10));
    assert_eq!(meminfo.number("HugePages_Free"), Some(3));
    assert_eq!(Meminfo("MemAvailable: x kB".into()).bytes("MemAvailable"), None);
    assert!(Meminfo::read().unwrap().bytes("MemAvailable").is_some());
}
