//! That a region is taken into use only where its own GRACE is enough.

use farside_fabric::shm::HugePages;

use super::*;

const BYTES: u64 = 8 << 20;

fn config(listen: &str, path: &Path, grace_ms: u32) -> ServerConfig {
    let (listen, region_file) = (listen.parse().ok(), Some(path.to_owned()));
    ServerConfig { listen, region_file, grace_ms, ..Default::default() }
}

/// As a server with this configuration opens the region in its file.
fn open_with(config: &ServerConfig) -> Result<Opened, ServerError> {
    let path = config.region_file.as_deref().unwrap();
    let mut memory = RegionMemory::file(path, BYTES, HugePages::Never).unwrap();
    let opened = open(&memory, config)?;
    memory.name_file().unwrap();
    Ok(opened)
}

#[test]
fn a_region_is_served_over_rdma_by_its_own_grace() {
    const RDMA: &str = "rdma://10.9.0.1:7400";
    let folder = tempfile::tempdir().unwrap();
    let (short, long) = (folder.path().join("short"), folder.path().join("long"));
    open_with(&config("shm:///run/kv.sock", &short, 10)).unwrap();
    open_with(&config("shm:///run/kv.sock", &long, 100)).unwrap();
    let before = std::fs::read(&short).unwrap();
    let mut wants = config(RDMA, &short, 100);
    let line = open_with(&wants).err().unwrap().to_string();
    assert!(line.contains("keeps grace_ms = 10") && line.contains("takes 53: lower"), "{line}");
    assert!(!line.contains('\n'));
    assert!(std::fs::read(&short).unwrap() == before, "the region was touched");
    wants.rdma.ack_timeout = 12;
    assert_eq!(open_with(&wants).unwrap().format.grace_ms, 10);
    // What the configuration has for new regions does not matter to this one.
    assert_eq!(open_with(&config(RDMA, &long, 10)).unwrap().format.grace_ms, 100);
    assert_eq!(open_with(&config("shm:///run/kv.sock", &short, 100)).unwrap().incarnation, 3);
}

#[test]
fn a_configuration_is_only_refused_for_the_grace_of_a_new_region() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    // An address of documentation: no device has it.
    let wants = config("rdma://192.0.2.1:7400", &path, 10);
    let refusal = || crate::Server::start(&wants).unwrap_err().to_string();
    assert!(refusal().starts_with("grace_ms = 10: over RDMA"), "{}", refusal());
    assert!(!path.exists());
    open_with(&config("shm:///run/kv.sock", &path, 100)).unwrap();
    assert!(!refusal().contains("grace_ms"), "{}", refusal());
}
