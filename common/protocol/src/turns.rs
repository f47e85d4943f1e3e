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
/// took effect and the second failed.
pub async fn change_in_turn<T>(
    (first, change_first): (RegionIndex, impl Future<Output = Result<bool, ChainError>>),
    (second, change_second): (RegionIndex, impl Future<Output = Result<T, ChainError>>),
) -> ProtocolResult<Option<T>> {
    if !change_first.await.map_err(|error| Failure::at(first, error))? {
        return Ok(None);
    }
    // Whatever the error says of the second change, the first one was made.
    let second_changed = change_second.await;
    second_changed.map(Some).map_err(|_| Failure::HalfDone { done: first, lost: second })
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn no_error_of_the_second_change_denies_the_first() {
        let regions = [RegionIndex(0), RegionIndex(1)];
        let change = |first, second: Result<(), ChainError>| {
            let in_turn = change_in_turn((regions[0], ready(first)), (regions[1], ready(second)));
            match pin!(in_turn).poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(changed) => changed,
                Poll::Pending => unreachable!("nothing is waited for"),
            }
        };
        for error in [
            ChainError::Fenced,
            ChainError::Unknown,
            ChainError::Late,
            ChainError::Busy,
            ChainError::Denied,
            ChainError::Unregistered { bytes: 1 },
        ] {
            let changed = change(Ok(true), Err(error.clone()));
            let Err(Failure::HalfDone { done, lost }) = changed else { panic!("{changed:?}") };
            assert_eq!([done, lost], regions, "{error}");
            assert!(matches!(change(Ok(false), Err(error)), Ok(None)));
        }
    }
}
