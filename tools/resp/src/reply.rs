//! Replies, encoded for the protocol that the client has chosen.

use super::Decimal;

/// The version of the protocol of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// RESP2, which each connection begins with.
    #[default]
    Two,
    /// RESP3, after `HELLO 3`.
    Three,
}

/// Appends replies to a buffer.
pub struct ReplyWriter<'o> {
    out: &'o mut Vec<u8>,
    protocol: Protocol,
}

impl<'o> ReplyWriter<'o> {
    /// A writer that appends to this buffer.
    #[inline]
    pub fn new(out: &'o mut Vec<u8>, protocol: Protocol) -> Self {
        Self { out, protocol }
    }

    /// The number of a length or an integer behind its type, and the end of the line.
    #[inline]
    fn header(&mut self, kind: u8, number: i64) {
        self.out.push(kind);
        self.out.extend_from_slice(Decimal::of(number).bytes());
        self.out.extend_from_slice(b"\r\n");
    }

    /// A line without line breaks of its own.
    fn line(&mut self, kind: u8, text: &[u8]) {
        self.out.push(kind);
        let printable = |byte: &u8| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte };
        self.out.extend(text.iter().map(printable));
        self.out.extend_from_slice(b"\r\n");
    }

    /// `+OK`.
    #[inline]
    pub fn ok(&mut self) {
        self.out.extend_from_slice(b"+OK\r\n");
    }

    /// A simple string.
    pub fn simple(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// An error. Its text begins with its code, such as `ERR`. Line breaks become spaces.
    pub fn error(&mut self, text: impl AsRef<[u8]>) {
        self.line(b'-', text.as_ref());
    }

    /// An integer.
    #[inline]
    pub fn integer(&mut self, number: i64) {
        self.header(b':', number);
    }

    /// A string of any bytes.
    #[inline]
    pub fn bulk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.header(b'$', bytes.len() as i64);
        self.out.extend_from_slice(bytes);
        self.out.extend_from_slice(b"\r\n");
    }

    /// No value.
    #[inline]
    pub fn null(&mut self) {
        self.out.extend_from_slice(match self.protocol {
            Protocol::Two => b"$-1\r\n",
            Protocol::Three => b"_\r\n",
        });
    }

    /// The start of an array of this many replies.
    pub fn array(&mut self, elements: usize) {
        self.header(b'*', elements as i64);
    }

    /// The start of a map of this many pairs; in RESP2 an array of twice as many replies.
    pub fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Two => self.header(b'*', 2 * pairs as i64),
            Protocol::Three => self.header(b'%', pairs as i64),
        }
    }

    /// The start of a set of this many replies; in RESP2 an array.
    pub fn set(&mut self, elements: usize) {
        let kind = if self.protocol == Protocol::Two { b'*' } else { b'~' };
        self.header(kind, elements as i64);
    }

    /// A text for people.
    pub fn verbatim(&mut self, text: &str) {
        match self.protocol {
            Protocol::Two => self.bulk(text),
            Protocol::Three => {
                self.header(b'=', text.len() as i64 + 4);
                self.out.extend_from_slice(b"txt:");
                self.out.extend_from_slice(text.as_bytes());
                self.out.extend_from_slice(b"\r\n");
            }
        }
    }
}
