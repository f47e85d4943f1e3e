//! Many PUTs in flight, for `load` and `restore`. Keys whose server is down are tried again.
//!
//! A server that restarts is down for a moment, and PUTs to it fail without an effect, or with an
//! unknown one. Both may be repeated, because they store the same value. Meanwhile the keys of
//! other shards go on.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use farside::OperationError::Indeterminate;
use farside::{Client, ConnectError, Error, Pipeline, Session, Store, Ticket};

/// The pause between two attempts to store the keys of a server that is down.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Limit on the memory of keys that wait for their server, in bytes. Beyond it, no other keys are
/// read until some of these are stored or given up.
const RETRY_BYTES_MAX: usize = 64 << 20;
/// An estimate of the memory of a waiting PUT beyond its key and value, in bytes.
const PUT_OVERHEAD_BYTES: usize = 256;

/// A value to store.
#[derive(Debug)]
pub(crate) struct Put<O> {
    /// Where it came from, for messages.
    pub(crate) origin: O,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    /// `None` for never.
    pub(crate) expires_at: Option<SystemTime>,
    pub(crate) is_pinned: bool,
}

impl<O> Put<O> {
    fn bytes(&self) -> usize {
        self.key.len() + self.value.len() + PUT_OVERHEAD_BYTES
    }
}

/// Gives the values, and gets their results.
pub(crate) trait PutSource {
    type Origin;

    /// Returns the next value; `None` at the end. After an error the values in flight are completed
    /// before the command ends with the error.
    fn next(&mut self) -> anyhow::Result<Option<Put<Self::Origin>>>;

    /// Notes that the value is stored.
    fn stored(&mut self, put: &Put<Self::Origin>);

    /// Notes that the value is not stored. An error ends the command.
    fn failed(&mut self, put: &Put<Self::Origin>, error: Error) -> anyhow::Result<()>;

    /// Fails if the command is to end at once.
    fn check(&self) -> anyhow::Result<()> {
        Ok(())
    }
}

/// The server that an operation did not reach: the number of its shard, if the error names one.
type Down = Option<u16>;

/// Returns the server that is down, if this is the reason for the error.
fn server_down(error: &Error) -> Option<Down> {
    match error {
        Error::Unavailable { shard, .. } => Some(Some(*shard)),
        Error::Disconnected { .. }
        | Error::Connect(ConnectError::Unreachable { .. })
        | Error::Operation(Indeterminate) => Some(None),
        _ => None,
    }
}

/// Whether the error concerns one server, and keys of others can be stored.
pub(crate) fn is_of_one_shard(error: &Error) -> bool {
    matches!(error, Error::Unavailable { .. } | Error::Operation(Indeterminate))
}

/// Stores all values. Tries again to store those whose server is down, until it was down for
/// `retry_for`. From then on its keys fail at once, until the end.
///
/// # Errors
/// Those of `source`. Those of connecting if no server is reached for `retry_for`.
pub(crate) fn store_all<S: PutSource>(
    session: &mut Session,
    source: &mut S,
    retry_for: Duration,
) -> anyhow::Result<()> {
    let mut puts = Puts {
        retry_for,
        in_flight: HashMap::new(),
        keys: HashSet::new(),
        held: None,
        retries: VecDeque::new(),
        retry_bytes: 0,
        round: 0,
        next_round_at: Instant::now(),
        outages: HashMap::new(),
        end: None,
    };
    while !puts.are_done() {
        source.check()?;
        match session.pipeline() {
            Ok(pipeline) => {
                if puts.retries.is_empty() {
                    // The last outage ended without a value that failed.
                    puts.outages.remove(&None);
                }
                puts.run(pipeline, source)?;
            }
            Err(error) if server_down(&error).is_some() && !puts.is_over(None) => {
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(error) => return Err(error.into()),
        }
    }
    puts.end.unwrap_or(Ok(()))
}

/// Fails if a server came back without its former content while this client was connected.
pub(crate) fn check_regions(client: &Client) -> anyhow::Result<()> {
    if client.admin().regions_replaced() > 0 {
        bail!(
            "a server came back with another region meanwhile, and what was stored there before \
             is gone: repeat the command"
        );
    }
    Ok(())
}

struct Puts<O> {
    retry_for: Duration,
    in_flight: HashMap<Ticket, Retry<O>>,
    /// The keys in flight and in `retries`. A second PUT of one of them must wait, because two PUTs
    /// in flight take effect in any order.
    keys: HashSet<Vec<u8>>,
    /// A value whose key is in `keys`. No other value is taken from the source before it.
    held: Option<Put<O>>,
    /// Values whose server was down.
    retries: VecDeque<Retry<O>>,
    /// The memory of `retries`, in bytes.
    retry_bytes: usize,
    /// How many of the `retries` the present round has yet to start.
    round: usize,
    next_round_at: Instant,
    /// Since when servers are down. One that was down for too long stays here.
    outages: HashMap<Down, Instant>,
    /// The end of the source, once it was reached.
    end: Option<anyhow::Result<()>>,
}

struct Retry<O> {
    put: Put<O>,
    /// The server that was down at the last attempt; `None` at the first attempt.
    failed_at: Option<Down>,
}

impl<O> Puts<O> {
    fn are_done(&self) -> bool {
        self.end.is_some()
            && self.held.is_none()
            && self.in_flight.is_empty()
            && self.retries.is_empty()
    }

    /// Whether the server has been down for too long.
    fn is_over(&mut self, down: Down) -> bool {
        self.outages.entry(down).or_insert_with(Instant::now).elapsed() >= self.retry_for
    }

    /// Stores values until all are stored, or until the pipeline is disconnected.
    fn run<S: PutSource<Origin = O>>(
        &mut self,
        mut pipeline: Pipeline<'_>,
        source: &mut S,
    ) -> anyhow::Result<()> {
        let mut is_lost = false;
        loop {
            source.check()?;
            if !is_lost {
                self.start_retries(&mut pipeline)?;
                self.start_new(&mut pipeline, source)?;
            }
            match pipeline.wait() {
                Some(completed) => {
                    let (ticket, result) = (completed.ticket, completed.result.map(|_| ()));
                    is_lost |= matches!(result, Err(Error::Disconnected { .. }));
                    self.complete(ticket, result, source)?;
                }
                None if is_lost || self.are_done() => return Ok(()),
                None => {
                    let now = Instant::now();
                    std::thread::sleep(self.next_round_at.saturating_duration_since(now));
                }
            }
        }
    }

    fn start(&mut self, pipeline: &mut Pipeline<'_>, retry: Retry<O>) -> anyhow::Result<()> {
        let put = &retry.put;
        let store = Store::always();
        let store = if put.is_pinned { store.pinned() } else { store };
        let store = put.expires_at.map_or(store, |at| store.until(at));
        let ticket = pipeline.store(&put.key, &put.value, store).context("no lane is free")?;
        self.in_flight.insert(ticket, retry);
        Ok(())
    }

    fn start_retries(&mut self, pipeline: &mut Pipeline<'_>) -> anyhow::Result<()> {
        if self.retries.is_empty() || (self.round == 0 && Instant::now() < self.next_round_at) {
            return Ok(());
        }
        if self.round == 0 {
            self.round = self.retries.len();
        }
        while self.round > 0 && pipeline.free_lanes() > 0 {
            let Some(retry) = self.retries.pop_front() else { break };
            self.retry_bytes -= retry.put.bytes();
            self.round -= 1;
            self.start(pipeline, retry)?;
        }
        if self.round == 0 {
            self.next_round_at = Instant::now() + RETRY_PAUSE;
        }
        Ok(())
    }

    fn start_new<S: PutSource<Origin = O>>(
        &mut self,
        pipeline: &mut Pipeline<'_>,
        source: &mut S,
    ) -> anyhow::Result<()> {
        while pipeline.free_lanes() > 0 && self.retry_bytes < RETRY_BYTES_MAX {
            let put = match self.held.take() {
                Some(put) => put,
                None if self.end.is_some() => break,
                None => match source.next() {
                    Ok(Some(put)) => put,
                    ended => {
                        self.end = Some(ended.map(|_| ()));
                        break;
                    }
                },
            };
            if self.keys.contains(&put.key) {
                self.held = Some(put);
                break;
            }
            self.keys.insert(put.key.clone());
            self.start(pipeline, Retry { put, failed_at: None })?;
        }
        Ok(())
    }

    fn complete<S: PutSource<Origin = O>>(
        &mut self,
        ticket: Ticket,
        result: farside::Result<()>,
        source: &mut S,
    ) -> anyhow::Result<()> {
        let retry = self.in_flight.remove(&ticket);
        let Retry { put, failed_at } =
            retry.context("the pipeline returned an unknown operation")?;
        match result {
            Ok(()) => {
                // The server is back.
                if let Some(down) = failed_at {
                    self.outages.remove(&down);
                    self.outages.remove(&None);
                }
                self.keys.remove(&put.key);
                source.stored(&put);
                Ok(())
            }
            Err(error) => match server_down(&error) {
                Some(down) if !self.is_over(down) => {
                    self.retry_bytes += put.bytes();
                    self.retries.push_back(Retry { put, failed_at: Some(down) });
                    Ok(())
                }
                _ => {
                    self.keys.remove(&put.key);
                    source.failed(&put, error)
                }
            },
        }
    }
}
