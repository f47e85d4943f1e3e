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
    /// The only shard that this concerns; `None` for all.
    pub(super) shard: Option<u16>,
}

impl<'c> Admin<'c> {
    /// Returns the number of shards; 1 without a cluster.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// for shard in 0..client.admin().shards() {
    ///     println!("{:?}", client.admin().shard(shard).statistics()?);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn shards(&self) -> u16 {
        self.client.shared.links.len() as u16
    }

    /// Returns what an administrator does with one shard of the cluster. A number that no shard has
    /// stands for the last shard.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// client.admin().shard(0).compact()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn shard(self, number: u16) -> Self {
        Self { shard: Some(number.min(self.shards() - 1)), ..self }
    }

    /// The shards that this concerns.
    fn concerned(&self) -> impl Iterator<Item = usize> + use<> {
        match self.shard {
            Some(shard) => usize::from(shard)..usize::from(shard) + 1,
            None => 0..self.client.shared.links.len(),
        }
    }

    /// Returns the server's statistics of its region and its clients: one message each way. In a
    /// cluster they are the sums over all shards, of the incarnation and the uptime the least, and
    /// of the directory's depth the greatest.
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
        self.sum(Control::statistics)
    }

    /// Asks the servers of all concerned shards a question, and sums the answers up.
    fn sum(
        &self,
        question: impl Fn(&Control) -> Option<ServerStatistics>,
    ) -> Result<ServerStatistics> {
        let mut answers = self.concerned().map(|shard| self.ask(shard, &question));
        // At least one shard is concerned.
        let first = answers.next().unwrap_or_else(|| Ok(ServerStatistics::default()))?;
        answers.try_fold(first, |sum, answer| Ok(sum.plus(&answer?)))
    }

    /// Asks a server a question that may safely be asked twice. If the connection is lost before
    /// the answer, asks again on a new one.
    fn ask<T>(&self, shard: usize, question: impl Fn(&Control) -> Option<T>) -> Result<T> {
        let shared = &self.client.shared;
        let mut budget = ReconnectBudget::default();
        loop {
            let connection = shared.connection(shard)?;
            match question(&connection.control) {
                Some(answer) => return Ok(answer),
                None if connection.control.is_lost() => shared.count_loss(shard, &mut budget)?,
                None => return Err(shared.unreachable(shard, Contact::Silent, ANSWER_TIMEOUT)),
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
        self.sum(|control| {
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
        self.concerned().try_for_each(|shard| {
            let connection = self.client.shared.connection(shard)?;
            connection.control.report_snapshot(permille.min(PERMILLE_COMPLETE));
            Ok(())
        })
    }

    /// How often this client, when it connected again, found another region than before. Then what
    /// was stored in the former one is gone: its server had no region file, or an operator gave the
    /// shard up. Sends nothing. In a cluster the sum over all shards.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// let mut session = client.session()?;
    /// session.put_many((0..1000_u32).map(|number| (number.to_le_bytes(), "value")))?;
    /// assert_eq!(client.admin().regions_replaced(), 0, "some of these keys are gone");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn regions_replaced(&self) -> u64 {
        let links = &self.client.shared.links;
        self.concerned().map(|shard| links[shard].regions_replaced()).sum()
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
        let mut session = self.client.session()?;
        self.concerned().try_fold(Compaction::default(), |sum, shard| {
            let of_shard = crate::compact::compact(&mut session, shard)?;
            Ok(Compaction {
                chunks_thin: sum.chunks_thin + of_shard.chunks_thin,
                blocks_moved: sum.blocks_moved + of_shard.blocks_moved,
                bytes_moved: sum.bytes_moved + of_shard.bytes_moved,
            })
        })
    }
}
