//! One change of two regions, the first before the second.

use farside_fabric::{ChainError, RegionIndex};

use crate::ProtocolResult;
use crate::failure::Failure;

/// Changes one region and then, if that took effect, another. `None` if it did not; else what the
/// second change came to.
///
/// Each change is a region and a future of chains there, which post nothing before they are polled.
/// The first one says whether it took effect. A chain that came too late is the future's own to
/// repeat.
///
/// # Errors
/// [`Failure::Lost`] and [`OperationError::Indeterminate`](crate::OperationError::Indeterminate) of
/// the first region, when the second was not touched; [`Failure::HalfDone`] when the first change
/// took effect and then the second region was lost.
pub async fn change_in_turn<T>(
    (first, change_first): (RegionIndex, impl Future<Output = Result<bool, ChainError>>),
    (second, change_second): (RegionIndex, impl Future<Output = Result<T, ChainError>>),
) -> ProtocolResult<Option<T>> {
    if !change_first.await.map_err(|error| Failure::at(first, error))? {
        return Ok(None);
    }
    match change_second.await {
        Ok(done) => Ok(Some(done)),
        Err(ChainError::Fenced | ChainError::Unknown) => {
            Err(Failure::HalfDone { done: first, lost: second })
        }
        Err(error) => Err(Failure::at(second, error)),
    }
}
