//! Proves that a region gets 2 MiB pages on a machine without a pool of them, and that `stat`
//! reports the same bytes as the kernel. A server that starts on a region of small pages makes huge
//! ones while clients use it.
//!
//! A server over RDMA registers its region in slices, and clients of all kinds reach all of it.
//! Guards against a block, a row or a word for which a client takes the key of another slice.

use std::fs;
use std::process::Command;

use farside::{Client, Role};
use farside_fabric::memory::collapse_refusal;
use farside_tests::command::{CommandOutput, command};
use farside_tests::engine::attach;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, binary, device, fill, free_tcp_address, left_out, new_address,
    wait_until,
};

/// Returns whether this test is left out on this machine, and prints why.
fn is_left_out() -> bool {
    let refusal = collapse_refusal();
    if let Some(refusal) = &refusal {
        left_out("on this machine", &refusal.to_string());
    }
    refusal.is_some()
}

/// Returns the bytes of the server's mapping that are in 2 MiB pages, by the kernel. Over TCP the
/// server has another mapping for readers, with as many pages of them as it was used for.
fn mapped_huge(server: &ServerProcess, memory_mib: u64) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", server.pid())).unwrap();
    let kib = |line: &str, name: &str| {
        let number = line.strip_prefix(name)?.strip_suffix(" kB")?.trim();
        Some(number.parse::<u64>().unwrap())
    };
    let mut lines = smaps.lines();
    let mut most = None;
    let is_region = |line: &str| kib(line, "Size:") == Some(memory_mib << 10);
    while let Some(line) = lines.next() {
        if !is_region(line) {
            continue;
        }
        let fields = lines.by_ref().take_while(|line| !line.starts_with("VmFlags"));
        let huge: u64 = fields
            .filter_map(|line| {
                kib(line, "ShmemPmdMapped:")
                    .or_else(|| kib(line, "Shared_Hugetlb:"))
                    .or_else(|| kib(line, "Private_Hugetlb:"))
            })
            .sum();
        most = most.max(Some(huge << 10));
    }
    most.unwrap_or_else(|| panic!("no mapping of {memory_mib} MiB: {smaps}"))
}

#[on(shm, rdma_in_soak)]
fn stat_reports_the_same_huge_pages_as_the_kernel() {
    if is_left_out() {
        return;
    }
    let server = ServerProcess::start("--memory 40MiB");
    let huge = server.client().admin().statistics().unwrap().huge_page_bytes;
    assert_eq!(huge, mapped_huge(&server, 40), "{}", server.log());
    assert!(
        huge > 0,
        "no huge pages, although even a fragmented machine has some: {}",
        server.log()
    );
    let stat = server.cli(&["stat", "--json"]);
    assert!(stat.text().contains(&format!("\"huge_page_bytes\":{huge}")), "{stat:?}");
    if huge == 40 << 20 {
        assert!(server.log().contains("2 MiB pages"), "{}", server.log());
    }
    let small = ServerProcess::start("--memory 40MiB --huge-pages never");
    assert_eq!(small.client().admin().statistics().unwrap().huge_page_bytes, 0);
    assert!(small.log().contains("4 KiB pages"), "{}", small.log());
}

#[on(shm)]
fn a_region_of_small_pages_gets_huge_ones_while_it_is_used() {
    // Over RDMA the start waits for the pages, and the figure is final at once.
    if is_left_out() {
        return;
    }
    const KEYS: u64 = 20_000;
    let memory_mib = 512;
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("server.toml");
    std::fs::write(&config, "huge_pages = 'never'\n").unwrap();
    let arguments = format!("--config {} --memory 512MiB", config.display());
    let mut server = ServerProcess::start_with_file(&arguments);
    fill(&mut server.session(), 0..KEYS, |n| [n as u8; 500]);
    server.terminate();
    std::fs::write(&config, "").unwrap();
    server.restart();
    let client = server.client();
    let mut session = client.session().unwrap();
    let mut rounds = 0u64;
    wait_until("the pages are made", TEST_TIMEOUT, || {
        for n in 0..KEYS {
            let key = n.to_le_bytes();
            let value = session.get(key).unwrap().unwrap();
            assert_eq!(*value, [(n + rounds) as u8; 500][..]);
            session.put(key, [(n + rounds + 1) as u8; 500]).unwrap();
        }
        rounds += 1;
        let log = server.log();
        let is_complete = !log.contains("in the background") || log.contains("the region has");
        log.matches("serving").count() == 2 && is_complete
    });
    let huge = client.admin().statistics().unwrap().huge_page_bytes;
    assert_eq!(huge, mapped_huge(&server, memory_mib), "{}", server.log());
    assert!(huge > 0, "{}", server.log());
    drop(session);
    server.assert_verifies();
}

const CONFIG: &str = "[rdma]\nmr_slice = \"8MiB\"\n";
/// The longest values, whose blocks take two chunks.
const VALUE_BYTES: usize = 4_193_248;

fn value(seed: u64) -> Vec<u8> {
    (0..VALUE_BYTES).map(|at| (at as u64 * 31 + seed * 7 + (at as u64 >> 9)) as u8).collect()
}

#[on(rdma)]
fn clients_use_a_whole_region_that_is_registered_in_slices() {
    let tcp = free_tcp_address();
    // In emulation a READ of 4 MiB takes longer than the default GRACE.
    let arguments =
        format!("--memory 64MiB --value-bytes-max {VALUE_BYTES} --listen {tcp} --grace-ms 2000");
    let server = ServerProcess::start_with_config(CONFIG, &arguments);
    server.wait_for_log("registered the region in slices of 8MiB");
    let client = server.client();
    let mut session = client.session().unwrap();
    let mut stored = 0;
    // A small block after the first long ones takes one chunk. So spans of two chunks begin at
    // chunks of both parities, and some of them cross a border.
    for key in 0u64..40 {
        if key == 7 {
            session.put("small", "value").unwrap();
        }
        if session.put(key.to_le_bytes(), value(key)).is_err() {
            break;
        }
        stored = key + 1;
    }
    assert!(stored >= 12, "only {stored} values of 64 MiB");
    for key in 0..stored {
        let read = session.get(key.to_le_bytes()).unwrap().unwrap();
        assert!(*read == value(key)[..], "key {key}");
    }
    let builder = server.client_builder().role(Role::Reader);
    let mut reader = builder.connect().unwrap().session().unwrap();
    // The server's threads execute the verbs of this client, and its device the atomic ones.
    let over_tcp = Client::builder().server(&tcp).connect().unwrap();
    let mut over_tcp = over_tcp.session().unwrap();
    for key in 0..stored {
        for session in [&mut reader, &mut over_tcp] {
            let read = session.get(key.to_le_bytes()).unwrap().unwrap();
            assert!(*read == value(key)[..], "key {key}");
        }
        assert!(over_tcp.delete(key.to_le_bytes()).unwrap());
        assert_eq!(session.increment("count", 1).unwrap(), 2 * key as i64 + 1);
        assert_eq!(over_tcp.increment("count", 1).unwrap(), 2 * key as i64 + 2);
    }
    drop((session, reader, over_tcp, client));
    server.assert_verifies();
}

/// The welcome has the slices, and a whole region has none.
#[on(rdma)]
fn the_welcome_names_the_slices() {
    let sliced = ServerProcess::start_with_config(CONFIG, "--memory 34MiB");
    let rkeys = attach(&sliced.address()).welcome.rkeys;
    assert_eq!(rkeys.slice_bytes, 8 << 20);
    assert!(rkeys.keys[..5].iter().all(|key| *key != 0), "{rkeys:?}");
    let whole = ServerProcess::start_with_config(CONFIG, "--memory 8MiB");
    assert_eq!(attach(&whole.address()).welcome.rkeys.slice_bytes, 0);
}

#[on(rdma_in_soak)]
fn too_many_slices_are_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    fs::write(&file, CONFIG).unwrap();
    let mut server = Command::new("timeout");
    let address = new_address(folder.path());
    server.arg("20").arg(binary("kv-server")).args(["--memory", "256MiB", "--config"]);
    let output = CommandOutput::of(server.arg(&file).args(["--listen", &address]));
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    // Lines of the log come before it.
    let line = output.stderr.lines().last().unwrap_or_default();
    for part in ["kv-server: rdma.mr_slice", "256 MiB into 32 slices", "write at least \"16MiB\""] {
        assert!(line.contains(part), "{line}");
    }
}

#[on(each, rdma_in_soak)]
fn doctor_measures_the_device_or_says_why_not() {
    let doctor = |arguments: &[&str]| {
        let mut doctor = command("kv-cli");
        CommandOutput::of(doctor.arg("doctor").args(arguments))
    };
    for wrong in ["1MiB", "17MiB", "512GiB", "64"] {
        let output = doctor(&[&format!("--measure={wrong}")]);
        assert_eq!(output.code, Some(2), "{}", output.text());
        assert_eq!(output.stderr.lines().count(), 1, "{}", output.stderr);
    }
    let output = doctor(&["--measure", "64MiB"]).succeeded();
    let rate = output.text().split("WRITE rate").nth(1).unwrap_or_default();
    let figures = ["/s into one memory region of 64MiB", "/s into 4 slices of 16MiB"];
    let is_measured = figures.iter().all(|figure| rate.contains(figure));
    let is_explained = device().is_none() && rate.contains("not measured") && rate.contains("->");
    assert!(is_measured || is_explained, "{}", output.text());
}
