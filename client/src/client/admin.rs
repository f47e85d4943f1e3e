//! What an operator does: statistics, and the upkeep of a region.

use std::time::{Duration, Instant};

use farside_control::{ConnectedClient, Role, ServerStatistics};

#[cfg(doc)]
use crate::ConnectError;
use crate::control::{ANSWER_TIMEOUT, Control, PERMILLE_COMPLETE};
use crate::hot_keys::{HotKeys, KeyReads};
use crate::reconnecting::ReconnectBudget;
use crate::{Client, Compaction, Contact, OperationError, Result};

/// How long [`Admin::collect`] sleeps before it asks again whether the collection has ended.
const COLLECT_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long [`Admin::collect`] waits for collections in all. Silent writers delay each by several
/// seconds, and others may die meanwhile.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(15);
/// For how long one request of [`Admin::hot_keys`] has a server sample reads, and when the next
/// request follows.
const SAMPLE_TIME: Duration = Duration::from_secs(3);
const SAMPLE_PAUSE: Duration = Duration::from_secs(1);

/// What an operator does with a region. From [`Client::admin`].
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

    /// Returns what an operator does with one shard of the cluster. A number that no shard has
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
    /// ended, for 15 s at most. Returns the server's statistics of that moment. Other clients
    /// continue to work. The server walks the index twice, and waits for the report of its slowest
    /// writer.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// println!("{} blocks came back", client.admin().collect()?.blocks_collected);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`OperationError::Denied`] for a reader, [`ConnectError::Unreachable`] if the server does
    /// not answer, [`OperationError::Collecting`] if the search has not ended in time.
    pub fn collect(&self) -> Result<ServerStatistics> {
        self.check_writer()?;
        let until = Instant::now() + COLLECT_TIMEOUT;
        let collected =
            self.concerned().try_fold(None, |sum: Option<ServerStatistics>, shard| {
                let current = self.ask(shard, |control| {
                    let before = control.collect()?;
                    loop {
                        let current = control.statistics()?;
                        if current.collections >= before.collections_next {
                            return Some(Some(current));
                        }
                        if Instant::now() >= until {
                            return Some(None);
                        }
                        std::thread::sleep(COLLECT_POLL_INTERVAL);
                    }
                })?;
                let waited_s = COLLECT_TIMEOUT.as_secs();
                let current = current.ok_or(OperationError::Collecting { waited_s })?;
                Ok::<_, crate::Error>(Some(sum.map_or(current.clone(), |sum| sum.plus(&current))))
            })?;
        // At least one shard is concerned.
        Ok(collected.unwrap_or_default())
    }

    fn check_writer(&self) -> Result<()> {
        match self.client.shared.role() {
            Role::Writer => Ok(()),
            Role::Reader => Err(OperationError::Denied.into()),
        }
    }

    /// Returns the clients of the server, this one included, in the order of their ids. In a
    /// cluster those of all concerned shards, one shard after another.
    ///
    /// The server also asks its clients to describe themselves. So a second call, some
    /// milliseconds later, returns newer descriptions. The server relies on nothing in them.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// for connected in client.admin().clients()? {
    ///     println!("{} {:?} {:?}", connected.id, connected.role, connected.description);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ConnectError::Unreachable`] if the server does not answer.
    pub fn clients(&self) -> Result<Vec<ConnectedClient>> {
        self.concerned().try_fold(Vec::new(), |mut all, shard| {
            all.extend(self.ask(shard, Control::clients)?);
            Ok(all)
        })
    }

    /// Has the server disconnect and fence the client with this id. Returns whether it was
    /// connected. In a cluster an id belongs to one server, so choose the [shard](Admin::shard).
    ///
    /// The client's sessions connect again with their next operation, under a new id. To keep a
    /// client out, stop its process, or change the secret and restart the server.
    ///
    /// ```no_run
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// if !client.admin().shard(0).kick(17)? {
    ///     println!("no client of this shard has the id 17");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`OperationError::Denied`] for a reader, [`ConnectError::Unreachable`] if the server does
    /// not answer. Then the client may be disconnected or not. Also if it was this client itself.
    pub fn kick(&self, client_id: u16) -> Result<bool> {
        self.check_writer()?;
        self.concerned().try_fold(false, |was_connected, shard| {
            // Once only: if the server was restarted meanwhile, another client may have the id.
            let shared = &self.client.shared;
            let (control, asked_at) = (&shared.connection(shard)?.control, Instant::now());
            let Some(kicked) = control.kick(client_id) else {
                let contact = if control.is_lost() { Contact::Lost } else { Contact::Silent };
                return Err(shared.unreachable(shard, contact, asked_at.elapsed()));
            };
            Ok(kicked || was_connected)
        })
    }

    /// Has the servers sample the reads of all clients for this time, and returns the keys that
    /// were read most, at most `count` of them. Keys that are absent by then are left out.
    ///
    /// A sample has one in 16 reads of each client, chosen at random. Reads that were combined
    /// count once. If several programs ask at the same time, all get what was sampled for any.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # let client = farside::Client::builder().server("shm:///run/farside/kv.sock").connect()?;
    /// let hot = client.admin().hot_keys(Duration::from_secs(5), 20)?;
    /// for key in hot.keys {
    ///     println!("{:.1} % {:?}", key.reads as f64 * 100.0 / hot.samples as f64, key.key);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`](crate::Session::get).
    pub fn hot_keys(&self, time: Duration, count: usize) -> Result<HotKeys> {
        let shards: Vec<usize> = self.concerned().collect();
        let mut session = self.client.session()?;
        let began = Instant::now();
        loop {
            let left = time.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            // In parts, so that the server soon stops to sample for a program that has ended.
            let for_ms = left.min(SAMPLE_TIME).as_millis() as u32;
            let ask = |shard: &usize| self.ask(*shard, |it| it.hot_blocks(for_ms)).map(drop);
            shards.iter().try_for_each(ask)?;
            std::thread::sleep(left.min(SAMPLE_PAUSE));
        }
        let hottest = |shard: usize| self.ask(shard, |control| control.hot_blocks(0));
        let hottest = shards.iter().map(|shard| hottest(*shard)).collect::<Result<Vec<_>>>()?;
        let mut reads = KeyReads::default();
        for (shard, (samples, blocks)) in shards.into_iter().zip(hottest) {
            reads.add(&mut session, shard, samples, &blocks)?;
        }
        reads.hottest(&mut session, count)
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
