//! Replies, encoded for the protocol that the client has chosen, and decimal numbers as redis reads
//! and writes them.

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

/// The longest decimal number of 64 bits with a sign, in bytes.
const INTEGER_BYTES_MAX: usize = 20;

/// Returns the integer of 64 bits that the bytes are. No plus sign, no leading zeros, no spaces,
/// no `-0`: only the text that the number would be written as.
pub fn parse_integer(bytes: &[u8]) -> Option<i64> {
    if bytes.len() > INTEGER_BYTES_MAX {
        return None;
    }
    let (is_negative, digits) = match bytes {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    match digits {
        [b'0'] if !is_negative => return Some(0),
        [b'1'..=b'9', ..] => {}
        _ => return None,
    }
    digits.iter().try_fold(0_i64, |sum, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 10)?;
        let sum = sum.checked_mul(10)?;
        let digit = i64::from(digit);
        // Counted downwards if negative, because the lowest number has no positive counterpart.
        if is_negative { sum.checked_sub(digit) } else { sum.checked_add(digit) }
    })
}

/// A number as decimal text.
pub struct Decimal {
    text: [u8; INTEGER_BYTES_MAX],
    start: usize,
}

impl Decimal {
    /// The text of a number.
    #[inline]
    pub fn of(number: i64) -> Self {
        let (mut text, mut start) = ([0; INTEGER_BYTES_MAX], INTEGER_BYTES_MAX);
        let mut rest = number.unsigned_abs();
        loop {
            start -= 1;
            text[start] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if number < 0 {
            start -= 1;
            text[start] = b'-';
        }
        Self { text, start }
    }

    /// The bytes of the text.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.text[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_the_text_of_a_number_is_one() {
        for number in [0, 7, -7, 10, i64::MAX, i64::MIN] {
            let text = number.to_string();
            assert_eq!(parse_integer(text.as_bytes()), Some(number));
            assert_eq!(Decimal::of(number).bytes(), text.as_bytes());
        }
        let wrong =
            ["", "-", "-0", "+1", "01", " 1", "1 ", "1.0", "9223372036854775808", "0x1", "00"];
        for wrong in wrong {
            assert_eq!(parse_integer(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(parse_integer(b"-9223372036854775809"), None);
    }

    proptest! {
        #[test]
        fn a_number_is_read_as_it_is_written(number: i64, bytes: Vec<u8>) {
            prop_assert_eq!(parse_integer(Decimal::of(number).bytes()), Some(number));
            if let Some(number) = parse_integer(&bytes) {
                let text = Decimal::of(number);
                prop_assert_eq!(text.bytes(), &bytes[..]);
            }
        }
    }
}
