//! What there is in the depot, in numbers.

use farside_control::ClassStatistics;
use farside_fabric::Nanos;
use farside_layout::SizeClass;

use super::{Chunk, Depot};

/// What has come back since the server started, for a class or for a request for a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Returned {
    /// Blocks of the class.
    pub(crate) blocks: u64,
    /// Chunks that lost their class.
    pub(crate) chunks: u64,
}

impl Depot {
    /// Whether any block of the class is linked or with a client.
    pub(crate) fn has_out(&self, class: SizeClass) -> bool {
        let shelf = &self.shelves[usize::from(class.index())];
        shelf.held < shelf.blocks
    }

    /// What has come back of a class, or for a request for a chunk.
    pub(crate) fn returned(&self, class: Option<SizeClass>) -> Returned {
        let blocks = class.map(|class| self.shelves[usize::from(class.index())].returned);
        Returned { blocks: blocks.unwrap_or_default(), chunks: self.emptied }
    }

    /// Whether the class, which has none now, may have a block by then; or a request for a chunk
    /// may have one.
    pub(crate) fn has_some_by(&self, class: Option<SizeClass>, then: Nanos) -> bool {
        let resting = class.map(|class| self.shelves[usize::from(class.index())].resting_count);
        let whole = self.whole.first();
        let emptied = whole.map(|(since, _)| since.saturating_add(self.options.chunk_rest));
        resting.is_some_and(|count| count > 0) || emptied.is_some_and(|at| at <= then)
    }

    /// Chunks without a use.
    pub(crate) fn chunks_free(&self) -> u64 {
        self.free.len() as u64
    }

    /// Chunks of spans all of whose blocks are free, which still keep their class.
    pub(crate) fn chunks_whole(&self) -> u64 {
        let chunks = |chunk: u32| match self.chunks.get(chunk as usize) {
            Some(Chunk::Span(span)) => span.class.chunks_per_span(),
            _ => 0,
        };
        self.whole.iter().map(|(_, chunk)| chunks(*chunk)).sum()
    }

    /// Chunks that lost their class since the server started.
    pub(crate) fn chunks_emptied(&self) -> u64 {
        self.emptied
    }

    /// Chunks with subtables.
    pub(crate) fn chunks_index(&self) -> u64 {
        self.chunks.iter().filter(|chunk| matches!(chunk, Chunk::Subtables)).count() as u64
    }

    /// What there is of each class that has chunks.
    pub(crate) fn classes(&self) -> Vec<ClassStatistics> {
        let shelves = SizeClass::all().zip(&self.shelves).filter(|(_, shelf)| shelf.blocks > 0);
        shelves
            .map(|(class, shelf)| ClassStatistics {
                class,
                blocks: shelf.blocks,
                blocks_free: shelf.held,
                blocks_resting: shelf.resting_count,
            })
            .collect()
    }
}
