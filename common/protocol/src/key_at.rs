//! Finds out which key the block at an address has.

use farside_fabric::{Buffer, Fabric, LaneId};
use farside_layout::{BLOCK_HEADER_BYTES, BlockHeader, NamedBlock};
use zerocopy::FromBytes;

use super::{ProtocolResult, read_block};
use crate::region_handle::RegionHandle;

/// READs the key in the block at an address. `None` if the address or the header is none of a block
/// of this class with a key. One round trip.
///
/// The block may be free, or may be being rewritten, and only the lengths in its header are
/// checked. So the key is a guess, until an operation finds it present.
pub async fn read_key_at<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    block: NamedBlock,
) -> ProtocolResult<Option<Vec<u8>>> {
    let Ok(block) = handle.region.geometry.check_block(block) else { return Ok(None) };
    let key_bytes_max = handle.region.format.key_bytes_max as usize;
    let longest = BLOCK_HEADER_BYTES + key_bytes_max as u64;
    let bytes = block.class.block_bytes().min(longest.next_multiple_of(8));
    handle.read(lane, &[read_block(block, bytes)]).await?;
    let buffer = handle.engine.endpoint.buffer(lane, Buffer::ReadBlock);
    let Ok((header, rest)) = BlockHeader::ref_from_prefix(&buffer[..bytes as usize]) else {
        return Ok(None);
    };
    let key_bytes = header.key_bytes();
    let fits = (1..=key_bytes_max).contains(&key_bytes) && header.is_of_class(block.class);
    Ok(rest.get(..key_bytes).filter(|_| fits).map(<[u8]>::to_vec))
}
