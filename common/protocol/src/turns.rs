//! A change of two regions, one after the other.

use farside_fabric::{ChainError, RegionIndex};

use crate::ProtocolResult;
use crate::failure::Failure;

/// Changes one region and then, if that took effect, another. Returns the result of the second
/// change; `None` if the first did not take effect.
///
/// Each change is a region and a future of chains there, which posts nothing before it is polled.
/// The first future returns whether its change took effect. A future repeats its own late chains.
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
            let changed = change(Ok(true), Err(error));
            let Err(Failure::HalfDone { done, lost }) = changed else { panic!("{changed:?}") };
            assert_eq!([done, lost], regions, "{error}");
            assert!(matches!(change(Ok(false), Err(error)), Ok(None)));
        }
    }
}
