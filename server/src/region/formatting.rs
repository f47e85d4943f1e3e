//! Formats a new region in zeroed memory.

use std::os::unix::fs::FileExt;

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_fabric::ChainError;
use farside_fabric::memory::{Region, RegionMemory};
use farside_layout::{
    CHUNK_BYTES, ChunkEntry, ChunkUse, DirectoryEntry, Geometry, ROW_BYTES, ROWS_PER_SUBTABLE,
    RowHeader, SUBTABLE_BYTES, Superblock,
};
use rustix::rand::GetRandomFlags;
use zerocopy::IntoBytes;

use crate::error::{ServerError, system};

/// The index of a new region gets at most half of the heap, so that blocks have room.
const INDEX_SHARE_DIVISOR: u64 = 2;
const SUBTABLES_PER_CHUNK: u64 = CHUNK_BYTES / SUBTABLE_BYTES;

/// Formats a region whose memory is all zeros. The superblock is written last, and its magic after
/// all else, so that no server takes an unfinished region for a complete one. The hash key is
/// random, unless that of a cluster is given.
pub(crate) fn format_region(
    region: &Region,
    config: &ServerConfig,
    hash_key: Option<[u8; 16]>,
) -> Result<(), ServerError> {
    let (mut region_id, mut random_key) = ([0; 16], [0; 16]);
    for random in [&mut region_id, &mut random_key] {
        rustix::rand::getrandom(&mut random[..], GetRandomFlags::empty())
            .map_err(system("get random numbers"))?;
    }
    let format = config.format(region.bytes(), region_id, hash_key.unwrap_or(random_key));
    let geometry = format.geometry();
    let depth = index_depth(&geometry, config.index)?;
    let superblock = Superblock::new(&format, depth).map_err(ServerError::Format)?;
    write_index(region, &geometry, depth)?;
    let mut words = [0; size_of::<Superblock>() / 8];
    words.as_mut_bytes().copy_from_slice(superblock.as_bytes());
    region.write(8, &words[1..])?;
    region.store(0, words[0])?;
    Ok(())
}

/// Returns the depth of the first directory: the index starts with 2^depth subtables.
fn index_depth(geometry: &Geometry, asked: Option<ByteSize>) -> Result<u8, ServerError> {
    let heap_bytes = u64::from(geometry.chunks()) * CHUNK_BYTES;
    let depth = match asked {
        // One subtable: the index grows later.
        None => 0,
        Some(asked) => {
            let subtables_max = heap_bytes / INDEX_SHARE_DIVISOR / SUBTABLE_BYTES;
            let subtables = asked.0.div_ceil(SUBTABLE_BYTES).max(1).checked_next_power_of_two();
            match subtables {
                Some(subtables) if subtables <= subtables_max => subtables.ilog2(),
                _ => {
                    let max = ByteSize(SUBTABLE_BYTES << subtables_max.ilog2());
                    return Err(ServerError::IndexTooLarge { asked, max });
                }
            }
        }
    };
    Ok(depth.min(geometry.directory_depth_max().into()) as u8)
}

/// Writes the subtables in the first chunks of the heap, and the directory that leads to them.
fn write_index(region: &Region, geometry: &Geometry, depth: u8) -> Result<(), ServerError> {
    // Never returned: a valid format has room for all of these.
    let outside = || ServerError::Access(ChainError::Outside { remote: 0, bytes: 0 });
    let subtables = 1u64 << depth;
    for chunk in 0..subtables.div_ceil(SUBTABLES_PER_CHUNK) as u32 {
        let entry = geometry.chunk_entry(chunk).ok_or_else(outside)?;
        region.store(entry, ChunkEntry::new(ChunkUse::Subtables).bits())?;
    }
    let heap = geometry.chunk_offset(0).ok_or_else(outside)?;
    let directory = geometry.directory_offset(depth).ok_or_else(outside)?;
    for prefix in 0..subtables {
        let subtable = heap + prefix * SUBTABLE_BYTES;
        let mut header = [0u64; size_of::<RowHeader>() / 8];
        header.as_mut_bytes().copy_from_slice(RowHeader::new(prefix as u32, depth).as_bytes());
        for row in 0..ROWS_PER_SUBTABLE as u64 {
            region.write(subtable + row * ROW_BYTES, &header)?;
        }
        region.store(directory + prefix * 8, DirectoryEntry::new(subtable, depth).bits())?;
    }
    Ok(())
}

/// Reads the bytes of the superblock from the region's file.
///
/// Not through the mapping: the file may have holes until it is known to be a region. If the system
/// has no memory to fill a hole, a load from the mapping kills the process.
pub(crate) fn superblock_bytes(memory: &RegionMemory) -> Result<Vec<u8>, ServerError> {
    let mut bytes = vec![0; size_of::<Superblock>().min(memory.region.bytes() as usize)];
    let read = memory.file.read_exact_at(&mut bytes, 0);
    read.map_err(system("read the superblock"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(bytes: u64) -> Geometry {
        ServerConfig::default().format(bytes, [0; 16], [0; 16]).geometry()
    }

    #[test]
    fn the_index_starts_with_one_subtable() {
        for bytes in [8 << 20, 64 << 20, 1 << 30, 1 << 38] {
            assert_eq!(index_depth(&geometry(bytes), None).unwrap(), 0);
        }
    }

    #[test]
    fn the_requested_index_size_is_rounded_up_or_refused() {
        let geometry = geometry(64 << 20);
        let depth = |text: &str| index_depth(&geometry, Some(text.parse().unwrap()));
        assert_eq!(depth("0B").unwrap(), 0);
        assert_eq!(depth("8KiB").unwrap(), 0);
        assert_eq!(depth("9KiB").unwrap(), 1);
        assert_eq!(depth("16MiB").unwrap(), 11);
        let error = depth("17MiB").unwrap_err().to_string();
        assert!(error.contains("at most \"16MiB\""), "{error}");
        assert!(depth("9999999TiB").is_err());
    }
}
