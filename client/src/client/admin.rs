//! What an administrator does: statistics, and the upkeep of a region.

use std::time::Duration;

use farside_control::{Role, ServerStatistics};

#[cfg(doc)]
use crate::ConnectError;
use crate::control::{ANSWER_TIMEOUT, Control, PERMILLE_COMPLETE};
use crate::reconnecting::ReconnectBudget;
use crate::{Client, Compaction, Contact, OperationError, Result};

/// How long [`Admin::collect`] sleeps before it asks again whether the collection has ended.
const COLLECT_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What an administrator does with a region. From [`Client::admin`].
#[derive(Clone, Copy, Debug)]
pub struct Admin<'c> {
    pub(super) client: &'c Client,
}

impl Admin<'_> {
    /// Returns the server's statistics of its region and its clients: one message each way.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// let statistics = client.admin().statistics()?;
    /// println!("{} clients, {} chunks free", statistics.clients, statistics.chunks_free);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ConnectError::Unreachable`] if the server does not answer.
    pub fn statistics(&self) -> Result<ServerStatistics> {
        self.ask(Control::statistics)
    }

    /// Asks the server a question that may safely be asked twice. If the connection is lost before
    /// the answer, asks again on a new one.
    fn ask<T>(&self, question: impl Fn(&Control) -> Option<T>) -> Result<T> {
        let mut budget = ReconnectBudget::default();
        loop {
            let connection = self.client.shared.connection()?;
            match question(&connection.control) {
                Some(answer) => return Ok(answer),
                None if connection.control.is_lost() => {
                    self.client.shared.count_loss(&mut budget)?
                }
                None => {
                    return Err(self.client.shared.unreachable(Contact::Silent, ANSWER_TIMEOUT));
                }
            }
        }
    }

    /// Has the server search for the blocks that dead clients held, and waits until the search has
    /// ended. Returns the server's statistics of that moment. Other clients continue to work. The
    /// server walks the index twice, and waits for the report of its slowest writer.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// println!("{} blocks came back", client.admin().collect()?.blocks_collected);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`OperationError::Denied`] for a reader, [`ConnectError::Unreachable`] if the server does
    /// not answer.
    pub fn collect(&self) -> Result<ServerStatistics> {
        if self.client.shared.role() == Role::Reader {
            return Err(OperationError::Denied.into());
        }
        self.ask(|control| {
            let before = control.collect()?;
            loop {
                let current = control.statistics()?;
                if current.collections >= before.collections_next {
                    return Some(current);
                }
                std::thread::sleep(COLLECT_POLL_INTERVAL);
            }
        })
    }

    /// Reports the progress of this program's snapshot to the server, in thousandths (1000:
    /// complete), for display in [`ServerStatistics`]. One message without an answer; it replaces
    /// an earlier report that is still unsent, unless that one was of a complete snapshot.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// client.admin().report_snapshot(500)?; // half done
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ConnectError::Unreachable`] if the server went away and did not return.
    pub fn report_snapshot(&self, permille: u32) -> Result<()> {
        self.client.shared.connection()?.control.report_snapshot(permille.min(PERMILLE_COMPLETE));
        Ok(())
    }

    /// Moves blocks out of chunks that are mostly free, as far as other chunks of their class have
    /// room. The moves are ordinary updates: values and their expiry stay, versions change. An
    /// emptied chunk can hold blocks of another size 288 x GRACE after its last block has left.
    ///
    /// Other clients may continue to work; keys that they change meanwhile are not moved. READs the
    /// index twice, and takes a GET and a compare-and-exchange for each block that moves.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// println!("{} blocks moved", client.admin().compact()?.blocks_moved);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`](crate::Session::put), except that it ends without an error when there is
    /// no more room.
    pub fn compact(&self) -> Result<Compaction> {
        crate::compact::compact(&mut self.client.session()?)
    }
}
