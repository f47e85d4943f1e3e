//! A connection to a server without the client library: a fabric on the region, and free blocks.

use std::io;
use std::time::{Duration, Instant};

use farside_config::ClientConfig;
use farside_control::attach::{self, ConnectError};
use farside_control::cluster::ShardView;
use farside_control::{
    BLOCKS_PER_MESSAGE_MAX, FreeBlock, MESSAGE_BYTES_MAX, Request, Role, ServerMessage,
    ServerRequest, ServerStatistics, say_goodbye,
};
use farside_fabric::{AnyFabric, boot_time_ns};
use farside_layout::{BLOCK_HEADER_BYTES, SizeClass};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::accounting::Machine;
use crate::{Error, Result};

/// How long the server may take to answer a message, or to accept one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server may put its region into huge pages before a measurement begins all the same.
const HUGE_PAGES_TIMEOUT: Duration = Duration::from_secs(20);
/// The server puts more memory into huge pages within this time, or it is done.
const HUGE_PAGES_PAUSE: Duration = Duration::from_millis(750);
/// The pause before a message is sent again to a server that had no room for it.
const SEND_PAUSE: Duration = Duration::from_millis(5);

/// A writer's connection, and the blocks that it took. Dropping it gives no block back; only
/// [`RawConnection::give_back`] does. After a drop the server notices that the client is gone and
/// collects the blocks.
pub struct RawConnection {
    server: attach::Attached,
    held: Vec<(SizeClass, FreeBlock)>,
}

impl RawConnection {
    /// Connects as a writer.
    pub fn connect(config: &ClientConfig) -> Result<Self> {
        Self::connect_to(config, None)
    }

    /// Connects as a writer, with a view to the server of the first shard of a cluster.
    pub fn connect_to(config: &ClientConfig, first_shard: Option<&ShardView>) -> Result<Self> {
        let options = config.connect_options(Role::Writer);
        let options = options.map_err(|error| Error::Usage(error.to_string()))?;
        let of_shard = |view| options.of_shard(0, view, |_| true).ok_or(ConnectError::OtherFabric);
        let options = first_shard.map_or_else(|| Ok(options.clone()), of_shard)?;
        Ok(Self { server: options.connect()?, held: Vec::new() })
    }

    /// Makes a fabric on the region.
    ///
    /// # Errors
    /// [`Error::Attach`]: over RDMA this connects a queue pair.
    pub fn fabric(&self, lanes: u16) -> Result<AnyFabric> {
        Ok(self.server.factory.fabric(lanes)?)
    }

    /// Takes up to `count` free blocks, as many as the server has. Returns where their content
    /// starts, after the header. The caller must not write to the header (I9).
    pub fn take_blocks(&mut self, class: SizeClass, count: usize) -> Result<Vec<u64>> {
        let mut targets = Vec::with_capacity(count);
        while targets.len() < count {
            let wanted = (count - targets.len()).min(BLOCKS_PER_MESSAGE_MAX) as u32;
            let reply = self.ask(&Request::TakeBlocks { class, count: wanted })?;
            let ServerMessage::Blocks { blocks, .. } = reply else { break };
            if blocks.is_empty() {
                break;
            }
            targets.extend(
                blocks.iter().map(|block| block.address.claimed_offset() + BLOCK_HEADER_BYTES),
            );
            self.held.extend(blocks.into_iter().map(|block| (class, block)));
        }
        Ok(targets)
    }

    /// How many blocks of this class can be taken so that some are left for other clients, without
    /// a key being evicted: half of the free ones.
    pub fn spare_blocks(&mut self, class: SizeClass) -> Result<usize> {
        Ok(self.free_blocks(class)? / 2)
    }

    /// How many blocks of this class can be taken, without a key being evicted.
    pub fn free_blocks(&mut self, class: SizeClass) -> Result<usize> {
        let statistics = self.statistics()?;
        let blocks = statistics.classes.iter().find(|blocks| blocks.class == class);
        let free =
            blocks.map_or(0, |blocks| blocks.blocks_free.saturating_sub(blocks.blocks_resting));
        // A server that has evicted keys keeps its free chunks for the index and for other classes.
        let spans = match statistics.keys_evicted {
            0 => statistics.chunks_free / class.chunks_per_span(),
            _ => 0,
        };
        Ok((free + spans * class.blocks_per_span()) as usize)
    }

    /// The length of the region, in bytes.
    pub fn region_bytes(&self) -> u64 {
        self.server.welcome.region_bytes
    }

    /// Waits until the server has put the region into huge pages, as far as the system has any.
    /// Meanwhile it takes processors and memory bandwidth.
    pub fn wait_for_huge_pages(&mut self) -> Result<()> {
        let until = Instant::now() + HUGE_PAGES_TIMEOUT;
        let (mut before, mut bytes) = (None, self.statistics()?.huge_page_bytes);
        while before != Some(bytes) && Instant::now() < until {
            std::thread::sleep(HUGE_PAGES_PAUSE);
            before = Some(bytes);
            bytes = self.statistics()?.huge_page_bytes;
        }
        Ok(())
    }

    /// Detects this machine, and the pages of the region.
    pub fn machine(&mut self) -> Result<Machine> {
        let huge_page_bytes = self.statistics()?.huge_page_bytes;
        Ok(Machine::detect(huge_page_bytes * 100 / self.server.welcome.region_bytes.max(1)))
    }

    /// The number of blocks that are linked or held by clients: that of keys, and a few more.
    pub fn blocks_in_use(&mut self) -> Result<u64> {
        let classes = self.statistics()?.classes;
        Ok(classes.iter().map(|class| class.blocks.saturating_sub(class.blocks_free)).sum())
    }

    fn statistics(&mut self) -> Result<ServerStatistics> {
        match self.ask(&Request::Statistics)? {
            ServerMessage::Statistics(statistics) => Ok(statistics),
            _ => Ok(ServerStatistics::default()),
        }
    }

    /// Answers the requests of the server since the last call. The server fences a client that does
    /// not report its blocks, or its clock, in time.
    pub fn answer_all(&mut self) -> Result<()> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let failed = || Error::system("reading from the server");
        while let Some(bytes) = self.server.channel.receive(&mut buffer).map_err(failed())? {
            if bytes == 0 {
                return Err(failed()(io::ErrorKind::ConnectionReset.into()));
            }
            self.answer(&ServerMessage::decode(&buffer[..bytes])?)?;
        }
        Ok(())
    }

    /// Sends a request and returns its reply. Answers requests of the server that come before it.
    fn ask(&mut self, request: &Request) -> Result<ServerMessage> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        self.send(request)?;
        loop {
            let bytes =
                self.receive(&mut buffer).map_err(Error::system("waiting for the server"))?;
            match ServerMessage::decode(&buffer[..bytes])? {
                asked @ ServerMessage::Request(_) => self.answer(&asked)?,
                reply => return Ok(reply),
            }
        }
    }

    fn answer(&mut self, asked: &ServerMessage) -> Result<()> {
        match asked {
            ServerMessage::Request(ServerRequest::Report { collection }) => {
                let held: Vec<_> = self.held.iter().map(|(_, block)| block.address).collect();
                Request::held(*collection, &held).try_for_each(|message| self.send(&message))
            }
            ServerMessage::Request(ServerRequest::Alive) => {
                self.send(&Request::Alive { clock_ns: boot_time_ns() })
            }
            // No other request needs an answer: this client can spare none of its blocks, and reads
            // no keys.
            _ => Ok(()),
        }
    }

    /// Gives all blocks back and says goodbye.
    pub fn give_back(mut self) -> Result<()> {
        let held = std::mem::take(&mut self.held);
        for part in held.chunk_by(|(a, _), (b, _)| a == b) {
            for part in part.chunks(BLOCKS_PER_MESSAGE_MAX) {
                let class = part[0].0;
                let blocks = part.iter().map(|(_, block)| *block).collect();
                // The blocks were never linked, so no reader can still see them.
                self.send(&Request::GiveBlocks { class, rested: true, blocks })?;
            }
        }
        say_goodbye(&mut *self.server.channel, ANSWER_TIMEOUT);
        Ok(())
    }

    /// Waits for a message. Returns its length.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let channel = &mut self.server.channel;
        let until = Instant::now() + ANSWER_TIMEOUT;
        loop {
            match channel.receive(buffer)? {
                Some(0) => return Err(io::ErrorKind::ConnectionReset.into()),
                Some(bytes) => return Ok(bytes),
                None => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(channel, PollFlags::IN)], timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn send(&mut self, request: &Request) -> Result<()> {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let until = Instant::now() + ANSWER_TIMEOUT;
        loop {
            match self.server.channel.send(&bytes) {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until =>
                {
                    std::thread::sleep(SEND_PAUSE);
                }
                sent => return sent.map_err(Error::system("asking the server")),
            }
        }
    }
}
