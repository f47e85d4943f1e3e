//! Opens a region for use: a new one, or one that a former server left.
//!
//! Former clients may still have it mapped, and may be in the middle of an operation. They are
//! fenced first. Then the server waits until their last verbs have taken effect, and for GRACE,
//! after which they no longer use what they have read.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_control::address::Address;
use farside_fabric::memory::{Region, RegionMemory};
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use farside_layout::{
    CLIENT_IDS, ChunkEntry, ChunkUse, Format, Geometry, INCARNATION_OFFSET, RegionState,
    STATE_OFFSET, SlotState, SlotWord, Superblock, grace_ms_min,
};

use crate::chores::depot::{Depot, DepotOptions, RegionAccess};
use crate::error::{Damage, ServerError};
use crate::region::content::Budget;
use crate::region::content::for_each_extent;
use crate::region::formatting::{format_region, superblock_bytes};
use crate::region::index::Cursor;
use crate::region::index::Index;
use crate::region::own_endpoint::OwnEndpoint;
use crate::region::served::{RegionTables, ServedRegion};

/// Maps the memory of the configured region.
pub(crate) fn region_memory(config: &ServerConfig) -> Result<RegionMemory, ServerError> {
    let (bytes, huge_pages) = (config.region_bytes(), config.huge_pages);
    Ok(match &config.region_file {
        Some(path) => RegionMemory::file(path, bytes, huge_pages)?,
        None => RegionMemory::anonymous(bytes, huge_pages)?,
    })
}

/// Opens the region in this memory: formats a new region, and checks an existing one.
pub(crate) fn open(
    memory: &RegionMemory,
    config: &ServerConfig,
) -> Result<ServedRegion, ServerError> {
    open_hashed(memory, config, None)
}

/// Opens a region as [`open`] does. A new one gets this hash key, if any.
pub(crate) fn open_hashed(
    memory: &RegionMemory,
    config: &ServerConfig,
    hash_key: Option<[u8; 16]>,
) -> Result<ServedRegion, ServerError> {
    let region = memory.region.clone();
    if memory.is_new {
        format_region(&region, config, hash_key)?;
    }
    let path = config.region_file.clone().unwrap_or_default();
    let decoded = Superblock::decode(&superblock_bytes(memory)?, region.bytes());
    let (superblock, format) = decoded.map_err(|source| ServerError::no_region(&path, source))?;
    let geometry = format.geometry();
    let depth = superblock
        .directory_depth(&geometry)
        .map_err(|source| ServerError::no_region(&path, source))?;
    let incarnation = superblock.incarnation() + 1;
    if !memory.is_new {
        check_grace(config, &path, &format)?;
        check_size(config, &path, &format)?;
        memory.reserve()?;
    }
    region.store(INCARNATION_OFFSET, incarnation)?;
    region.store(STATE_OFFSET, Superblock::state_word(RegionState::InUse, depth))?;
    // Clears the leases of all former clients, which fences them.
    for entry in (0..CLIENT_IDS as u16).filter_map(|client| geometry.client_entry(client)) {
        region.store(entry, 0)?;
    }
    let fenced_at = boot_time_ns();
    let recovery = Recovery { region: &region, geometry, depth, fenced_at };
    let recovered = recovery.run(&format, memory.is_new);
    let (index, depot, keys) =
        recovered.map_err(|damage| ServerError::Damaged { path: path.clone(), damage })?;
    if !memory.is_new {
        let state = superblock.state().unwrap_or(RegionState::InUse);
        // A region that was just restored has no former server, and fits the configuration.
        if config.restore.is_none() {
            let stop = match state {
                RegionState::Clean => "shut down cleanly",
                RegionState::InUse => "did not shut down cleanly",
            };
            let region = path.display();
            tracing::info!(
                %region,
                incarnation,
                "FS-003 continuing with a region; its last server {stop}"
            );
            warn_of_ignored_settings(config, &format);
        }
    }
    let is_new = memory.is_new;
    Ok(ServedRegion { region, format, geometry, incarnation, index, depot, is_new, keys })
}

/// Checks that the region has the configured size, if one is configured.
fn check_size(config: &ServerConfig, path: &Path, format: &Format) -> Result<(), ServerError> {
    let has = ByteSize(format.region_bytes);
    if config.memory.is_some() && config.region_bytes() != has.0 {
        let asked = ByteSize(config.region_bytes());
        return Err(ServerError::MemoryDiffers { path: path.to_owned(), asked, has });
    }
    Ok(())
}

/// Checks that the region's own GRACE is long enough for how late a verb can take effect with this
/// configuration. The configured `grace_ms` is only for new regions.
fn check_grace(config: &ServerConfig, path: &Path, format: &Format) -> Result<(), ServerError> {
    let lateness_max_ns = config.lateness_max_ns();
    let (grace_ms, grace_ms_min) = (format.grace_ms, grace_ms_min(lateness_max_ns));
    let is_shm = config.listen.iter().all(Address::is_shm);
    if !is_shm && u64::from(grace_ms) < grace_ms_min {
        let lateness_ms = lateness_max_ns / 1_000_000;
        let path = path.to_owned();
        return Err(ServerError::GraceTooShort { path, grace_ms, lateness_ms, grace_ms_min });
    }
    Ok(())
}

/// Warns of settings that have no effect, because the region was formatted with other values.
fn warn_of_ignored_settings(config: &ServerConfig, format: &Format) {
    for (key, asked, has) in [
        ("grace_ms", Some(config.grace_ms), format.grace_ms),
        ("key_bytes_max", config.key_bytes_max, format.key_bytes_max),
        ("value_bytes_max", config.value_bytes_max, format.value_bytes_max),
    ] {
        if let Some(asked) = asked
            && asked != has
        {
            tracing::warn!("FS-004 {key} = {asked} is for new regions: this one keeps {has}");
        }
    }
    if let Some(index) = config.index {
        tracing::warn!(
            "FS-004 index = {index} is for new regions: this one keeps the index that it has"
        );
    }
}

/// What opening a region finds: its index, its depot and the number of its keys.
type Recovered = (Index, Depot, u64);

struct Recovery<'a> {
    region: &'a Arc<Region>,
    geometry: Geometry,
    depth: u8,
    fenced_at: Nanos,
}

impl Recovery<'_> {
    fn run(&self, format: &Format, is_new: bool) -> Result<Recovered, Damage> {
        let uses = self.chunk_uses()?;
        let own = OwnEndpoint::over_memory(self.region);
        if !is_new {
            // Until this time the last verb of a former client may take effect.
            sleep_until(self.fenced_at + own.fence_delay_ns());
        }
        let (mut index, splits) = Index::read(self.region, &self.geometry, self.depth, &uses)?;
        index.resume(&splits, format, &own)?;
        let grace_ns = format.grace_ns();
        let [a, b, c, d, ..] = format.region_id;
        let options = DepotOptions::new(grace_ns, u32::from_le_bytes([a, b, c, d]));
        let mut depot = Depot::new(self.geometry, &uses, options, boot_time_ns());
        if is_new {
            return Ok((index, depot, 0));
        }
        let (linked, cleared) = self.walk(&index, &mut depot, &own)?;
        tracing::info!(keys = linked, unfinished = cleared, "the index was walked");
        // Until this time a former client may read a block that its last verb unlinked.
        sleep_until(self.fenced_at + own.fence_delay_ns() + grace_ns);
        Ok((index, depot, linked))
    }

    fn chunk_uses(&self) -> Result<Vec<ChunkUse>, Damage> {
        let mut uses = Vec::with_capacity(self.geometry.chunks() as usize);
        for chunk in 0..self.geometry.chunks() {
            let Some(entry) = self.geometry.chunk_entry(chunk) else { break };
            let entry = ChunkEntry::from_bits(self.region.load(entry)?);
            uses.push(entry.chunk_use().map_err(|source| Damage::Chunk { chunk, source })?);
        }
        let mut chunk = 0;
        while let Some(chunk_use) = uses.get(chunk) {
            let span = match chunk_use {
                ChunkUse::Blocks(class) => class.chunks_per_span() as usize,
                ChunkUse::Continued => {
                    // A server died after the first of the two stores that give a span to a class.
                    uses[chunk] = ChunkUse::Free;
                    let tables = RegionTables { region: self.region, geometry: &self.geometry };
                    let age = tables.entry(chunk as u32)?.age();
                    let free = ChunkEntry::new(ChunkUse::Free).with_age(age);
                    tables.set_entry(chunk as u32, free)?;
                    1
                }
                ChunkUse::Free | ChunkUse::Subtables => 1,
            };
            for continued in chunk + 1..chunk + span {
                if uses.get(continued) != Some(&ChunkUse::Continued) {
                    return Err(Damage::Span { chunk: continued as u32 });
                }
            }
            chunk += span;
        }
        Ok(uses)
    }

    /// Notes the linked blocks in the depot, and empties the slots of unfinished operations.
    /// Returns the number of linked blocks and of emptied slots.
    fn walk(
        &self,
        index: &Index,
        depot: &mut Depot,
        own: &OwnEndpoint,
    ) -> Result<(u64, u64), Damage> {
        let (mut linked, mut cleared) = (0, 0);
        let mut cursor = Cursor::default();
        let mut walk = cursor.walk(index, Budget::UNLIMITED);
        while let Some((slot, content)) = walk.next()? {
            let word = content.word();
            match word.state() {
                // MOVED: a slot of a free place, or of a row that a split has emptied.
                SlotState::Empty | SlotState::Moved => {}
                SlotState::Live | SlotState::Frozen => {
                    linked += u64::from(self.note_linked(index, depot, (slot, word))?);
                }
                SlotState::Pending | SlotState::Aborted | SlotState::Tomb => {
                    own.clear(slot, word)?;
                    cleared += 1;
                }
                SlotState::Copy => {
                    index.skipped.note(slot, "a split that has ended was moving the key");
                    keep_block(depot, word);
                }
            }
        }
        Ok((linked, cleared))
    }

    /// Notes the block to which this word leads, and its extents. Returns false for a damaged word.
    /// Other keys do not depend on it, so it is skipped, and stays for `kv-cli verify`.
    fn note_linked(
        &self,
        index: &Index,
        depot: &mut Depot,
        (slot, word): (u64, SlotWord),
    ) -> Result<bool, ChainError> {
        let mut note = |block| {
            let noted = depot.note_linked(block, boot_time_ns());
            noted.inspect_err(|why| index.skipped.note(slot, why)).is_ok()
        };
        let block = index.block_of(slot, word).filter(|block| note(**block));
        if let Some(block) = block {
            for_each_extent(self.region, block, |_, extent| {
                note(extent.block());
                Ok::<_, ChainError>(())
            })?;
        } else {
            keep_block(depot, word);
        }
        Ok(block.is_some())
    }
}

/// Keeps the block that a damaged word names from use, so that its content is not lost as well.
fn keep_block(depot: &mut Depot, word: SlotWord) {
    if let Ok(named) = word.block() {
        depot.note_linked_at(named.address, boot_time_ns());
    }
}

fn sleep_until(moment: Nanos) {
    // The clock counts the time in which the host is suspended, and the sleep does not. So the
    // sleep can only be too long.
    std::thread::sleep(Duration::from_nanos(moment.saturating_sub(boot_time_ns())));
}

#[cfg(test)]
mod tests {
    //! Checks that a server uses a region only if the region's own GRACE is long enough.

    use farside_fabric::memory::HugePages;

    use super::*;

    const BYTES: u64 = 8 << 20;

    fn config(listen: &str, path: &Path, grace_ms: u32) -> ServerConfig {
        let (listen, region_file) = (vec![listen.parse().unwrap()], Some(path.to_owned()));
        ServerConfig { listen, region_file, grace_ms, ..Default::default() }
    }

    /// Opens the region in its file as a server with this configuration does.
    fn open_with(config: &ServerConfig) -> Result<ServedRegion, ServerError> {
        let path = config.region_file.as_deref().unwrap();
        let mut memory = RegionMemory::file(path, BYTES, HugePages::Never).unwrap();
        let opened = open(&memory, config)?;
        memory.name_file().unwrap();
        Ok(opened)
    }

    #[test]
    fn a_region_is_served_over_rdma_only_if_its_own_grace_is_long_enough() {
        const RDMA: &str = "rdma://10.9.0.1:7400";
        let folder = tempfile::tempdir().unwrap();
        let (short, long) = (folder.path().join("short"), folder.path().join("long"));
        open_with(&config("shm:///run/kv.sock", &short, 10)).unwrap();
        open_with(&config("shm:///run/kv.sock", &long, 100)).unwrap();
        let before = std::fs::read(&short).unwrap();
        let mut wants = config(RDMA, &short, 100);
        let line = open_with(&wants).err().unwrap().to_string();
        assert!(line.contains("requires grace_ms >= 53; the region in"), "{line}");
        assert!(line.contains("has 10: over RDMA lower"), "{line}");
        assert!(!line.contains('\n'));
        assert!(std::fs::read(&short).unwrap() == before, "the region was touched");
        wants.rdma.ack_timeout = 12;
        assert_eq!(open_with(&wants).unwrap().format.grace_ms, 10);
        // The configured `grace_ms` does not matter to a region that exists.
        assert_eq!(open_with(&config(RDMA, &long, 10)).unwrap().format.grace_ms, 100);
        assert_eq!(open_with(&config("shm:///run/kv.sock", &short, 100)).unwrap().incarnation, 3);
    }

    #[test]
    fn the_configured_grace_matters_only_to_a_new_region() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("region");
        // An address of documentation: no device has it.
        let wants = config("rdma://192.0.2.1:7400", &path, 10);
        let refusal = || crate::Server::start(&wants).unwrap_err().to_string();
        assert!(refusal().starts_with("grace_ms = 10: with this rdma."), "{}", refusal());
        assert!(!path.exists());
        open_with(&config("shm:///run/kv.sock", &path, 100)).unwrap();
        assert!(!refusal().contains("grace_ms"), "{}", refusal());
    }
}
