//! For tests: performs one operation on a store, and returns whether the key was as required.

use farside_bench::records::Key;
use farside_bench::store::{Action, MeasuredStore};

pub(crate) trait TestOperations: MeasuredStore {
    fn get(&mut self, key: &Key, found: &mut Vec<u8>) -> Result<bool, Self::Error> {
        Ok(self.perform(Action::Get, key, &[], found)?.value.is_some())
    }

    fn change(&mut self, action: Action, key: &Key, value: &[u8]) -> Result<bool, Self::Error> {
        let mut found = Vec::new();
        Ok(self.perform(action, key, value, &mut found)?.applied)
    }
}

impl<S: MeasuredStore> TestOperations for S {}
