//! Proves that a region gets 2 MiB pages on a machine without a pool of them, and that `stat`
//! reports the same bytes as the kernel. A server that starts on a region of small pages makes huge
//! ones while clients use it.

use farside_fabric::memory::collapse_refusal;
use farside_tests::{ServerProcess, TEST_TIMEOUT, fill, left_out, wait_until};

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
