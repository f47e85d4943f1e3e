//! What an operation has in its lane's [`Buffer::NewBlock`]: its input, and images of blocks.
//!
//! The input is the key and the value that the caller gave, behind the room for a block's header. A
//! PUT stores it where it is. An operation whose new value depends on the present one assembles
//! that value behind the input, in an image of its own, and so do values with extents. Nothing but
//! [`Operation::fill`] writes the input, because the connection may be lost and the operation run
//! again from the same buffer (invariant I28).

use farside_fabric::{Buffer, Fabric, LaneId};
use farside_layout::{BLOCK_HEADER_BYTES, LayoutError};

use crate::{Operation, ProtocolResult};

/// Images behind the input begin at multiples of this.
const IMAGE_ALIGN: usize = 64;

/// The image of a block: room for the header, then the key and the value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Image {
    /// Where it begins in the buffer, as a byte offset.
    pub(crate) at: usize,
    pub(crate) value_bytes: usize,
}

/// Returns where an image can begin behind this byte offset.
pub(crate) fn image_behind(end: usize) -> usize {
    end.next_multiple_of(IMAGE_ALIGN)
}

impl<F: Fabric> Operation<'_, F> {
    /// The image of a block with the operation's input.
    #[inline]
    pub(crate) fn input(&self) -> Image {
        Image { at: 0, value_bytes: self.value_bytes }
    }

    /// The length of a block's header and the key, in bytes.
    #[inline]
    pub(crate) fn key_end(&self) -> usize {
        BLOCK_HEADER_BYTES as usize + self.key_bytes
    }

    /// The end of the input in the buffer, as a byte offset.
    pub(crate) fn input_end(&self) -> usize {
        self.key_end() + self.value_bytes
    }

    /// A lane's buffer from this byte offset on, which has to be behind the input.
    pub(crate) fn image_mut<'f>(&self, fabric: &'f mut F, lane: LaneId, at: usize) -> &'f mut [u8] {
        let (_input, behind) =
            fabric.buffer_mut(lane, Buffer::NewBlock).split_at_mut(self.input_end());
        &mut behind[at - self.input_end()..]
    }

    /// Begins an image of this many bytes behind the input: copies the key there. Returns the
    /// buffer from the image on.
    ///
    /// # Errors
    /// [`LayoutError::Truncated`] if the buffer has no room for the image.
    pub(crate) fn begin_image<'f>(
        &self,
        fabric: &'f mut F,
        lane: LaneId,
        at: usize,
        bytes: usize,
    ) -> ProtocolResult<&'f mut [u8]> {
        let buffer = fabric.buffer_mut(lane, Buffer::NewBlock);
        if buffer.len() < at + bytes {
            let bytes = buffer.len() as u64;
            return Err(LayoutError::Truncated { what: "buffer", bytes }.into());
        }
        let (input, behind) = buffer.split_at_mut(self.input_end());
        let image = &mut behind[at - self.input_end()..];
        let key = BLOCK_HEADER_BYTES as usize..self.key_end();
        image[key.clone()].copy_from_slice(&input[key]);
        Ok(image)
    }
}
