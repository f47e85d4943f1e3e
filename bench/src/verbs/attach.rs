//! A connection to a server without the client library: the region itself, and free blocks of it.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use farside_common::address::Address;
use farside_common::config::ClientConfig;
use farside_common::control::{
    BLOCKS_PER_MESSAGE_MAX, ConnectRequest, FreeBlock, MESSAGE_BYTES_MAX, Purpose, Reply, Request,
    Role, decode_reply,
};
use farside_common::fabric::shm::{Connection, Lease, Region, ShmFabric};
use farside_common::layout::{
    BLOCK_HEADER_BYTES, LayoutError, SUPERBLOCK_BYTES, SizeClass, Superblock,
};

use crate::{Error, Result};

/// How long the server may take for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a message is offered to a server that has no room for it.
const SEND_ATTEMPTS_MAX: u32 = 1000;
const SEND_PAUSE: Duration = Duration::from_millis(5);

/// A writer's connection, and the blocks it took. They are not given back if this is dropped
/// early: the server then finds out that the client is gone.
pub struct Attached {
    connection: Connection,
    region: Arc<Region>,
    lease: Lease,
    held: Vec<(SizeClass, FreeBlock)>,
}

impl Attached {
    /// Connects as a writer.
    ///
    /// # Errors
    /// What the server refuses, or what is wrong with its region.
    pub fn connect(config: &ClientConfig) -> Result<Self> {
        let address = config.server.as_deref().unwrap_or_default();
        let usage = |error: farside_common::address::AddressError| Error::Usage(error.to_string());
        let Address::Shm(path) = address.parse().map_err(usage)? else {
            return Err(Error::Usage(format!("{address}: kv-bench verbs knows only shm so far")));
        };
        let connection =
            Connection::connect(&path).map_err(Error::system("connecting to the server"))?;
        connection
            .set_receive_timeout(Some(ANSWER_TIMEOUT))
            .map_err(Error::system("preparing the connection"))?;
        let (role, purpose, token) = (Role::Writer, Purpose::Control, config.token());
        let request = ConnectRequest { role, purpose, token };
        connection.send(&request.encode(), None).map_err(Error::system("asking the server"))?;
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let (bytes, descriptor) =
            connection.receive(&mut buffer).map_err(Error::system("waiting for the server"))?;
        let welcome = decode_reply(&buffer[..bytes])??;
        let descriptor = descriptor.ok_or(Error::System {
            doing: "waiting for the region",
            source: io::ErrorKind::UnexpectedEof.into(),
        })?;
        let region =
            Region::map(&File::from(descriptor)).map_err(Error::system("mapping the region"))?;
        let lease =
            Lease { offset: lease_offset(&region, welcome.client_id)?, number: welcome.lease };
        Ok(Self { connection, region: Arc::new(region), lease, held: Vec::new() })
    }

    /// A fabric on the region.
    pub fn fabric(&self, lanes: u16) -> ShmFabric {
        ShmFabric::new(self.region.clone(), Some(self.lease), lanes)
    }

    /// Takes free blocks; returns where their content starts, behind the header: "a block header
    /// is a header for ever".
    ///
    /// # Errors
    /// [`Error::TooFewBlocks`] when the server has not enough.
    pub fn take_blocks(&mut self, class: SizeClass, count: usize) -> Result<Vec<u64>> {
        let mut targets = Vec::with_capacity(count);
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        while targets.len() < count {
            let wanted = (count - targets.len()).min(BLOCKS_PER_MESSAGE_MAX) as u32;
            self.send(&Request::TakeBlocks { class, count: wanted })?;
            let (bytes, _) = self
                .connection
                .receive(&mut buffer)
                .map_err(Error::system("waiting for blocks"))?;
            let Reply::Blocks { blocks, .. } = Reply::decode(&buffer[..bytes])? else { continue };
            if blocks.is_empty() {
                let (blocks, bytes) = (targets.len(), class.block_bytes());
                return Err(Error::TooFewBlocks { blocks, bytes });
            }
            targets.extend(blocks.iter().map(|block| block.address.offset() + BLOCK_HEADER_BYTES));
            self.held.extend(blocks.into_iter().map(|block| (class, block)));
        }
        Ok(targets)
    }

    /// Gives all blocks back and says goodbye.
    ///
    /// # Errors
    /// [`Error::System`] when the server is gone.
    pub fn give_back(mut self) -> Result<()> {
        let held = std::mem::take(&mut self.held);
        for part in held.chunk_by(|(a, _), (b, _)| a == b) {
            for part in part.chunks(BLOCKS_PER_MESSAGE_MAX) {
                let class = part[0].0;
                let blocks = part.iter().map(|(_, block)| *block).collect();
                // Nobody ever linked them.
                self.send(&Request::GiveBlocks { class, rested: true, blocks })?;
            }
        }
        self.send(&Request::Goodbye)
    }

    fn send(&self, request: &Request) -> Result<()> {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        for _ in 0..SEND_ATTEMPTS_MAX {
            match self.connection.send(&bytes, None) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(SEND_PAUSE);
                }
                sent => return sent.map_err(Error::system("asking the server")),
            }
        }
        let source = io::ErrorKind::TimedOut.into();
        Err(Error::System { doing: "asking the server", source })
    }
}

/// Where this client's entry in the client table is.
fn lease_offset(region: &Region, client_id: u16) -> Result<u64> {
    let mut words = [0; SUPERBLOCK_BYTES as usize / 8];
    region.read(0, &mut words)?;
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    let (_, format) = Superblock::decode(&bytes, region.bytes())?;
    let field = LayoutError::Field { field: "client id", value: client_id.into() };
    Ok(format.geometry().client_entry(client_id).ok_or(field)?)
}
