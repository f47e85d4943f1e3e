//! Redis and valkey, through the client library that works with both.

use std::path::Path;

use farside_bench::keys::Key;
use farside_bench::store::Action;
use redis::{Client, Cmd, Connection, Value};

use super::ServiceError;
use super::requests::Protocol;

/// A connection to redis or valkey.
pub struct RedisProtocol {
    connection: Connection,
    command: Cmd,
    packed: Vec<u8>,
}

impl RedisProtocol {
    /// Connects to the server that listens at this socket.
    pub fn connect(socket: &Path) -> Result<Self, ServiceError> {
        let client = Client::open(format!("unix://{}", socket.display()))?;
        let connection = client.get_connection()?;
        Ok(Self { connection, command: Cmd::new(), packed: Vec::new() })
    }
}

impl Protocol for RedisProtocol {
    fn request(&mut self, action: Action, key: &Key, value: &[u8]) {
        let command = &mut self.command;
        command.clear();
        match action {
            Action::Get => command.arg("GET").arg(&key[..]),
            Action::Put => command.arg("SET").arg(&key[..]).arg(value),
            Action::Insert => command.arg("SETNX").arg(&key[..]).arg(value),
        };
        command.write_packed_command(&mut self.packed);
    }

    fn send(&mut self) -> Result<(), ServiceError> {
        self.connection.send_packed_command(&self.packed)?;
        self.packed.clear();
        Ok(())
    }

    fn answer(&mut self, _: Action, value: &mut Vec<u8>) -> Result<bool, ServiceError> {
        match self.connection.recv_response()? {
            Value::BulkString(found) => {
                *value = found;
                Ok(true)
            }
            Value::Nil => Ok(false),
            Value::Okay => Ok(true),
            Value::Int(count) => Ok(count > 0),
            other => Err(ServiceError::Answer(format!("{other:?}"))),
        }
    }
}
