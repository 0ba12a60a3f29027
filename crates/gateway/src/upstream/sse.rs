//! Server-sent events, bounded: the bytes of a stream become events as they arrive.

use bytes::BytesMut;

/// An event.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) name: String,
    pub(super) data: String,
}

/// Takes bytes, gives events.
#[derive(Debug)]
pub(super) struct Parser {
    rest: BytesMut,
    event: Event,
    has_data: bool,
    /// Bytes of one event at most.
    limit: usize,
}

/// An event is longer than allowed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

impl Parser {
    pub(super) fn new(limit: usize) -> Self {
        Self { rest: BytesMut::new(), event: Event::default(), has_data: false, limit }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, TooLong> {
        // What was there has no end of a line: it is not looked at again with each byte that comes.
        let mut looked = self.rest.len();
        self.rest.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.rest[looked..].iter().position(|byte| *byte == b'\n') {
            let line = self.rest.split_to(std::mem::take(&mut looked) + end + 1);
            let line = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
            events.extend(self.line(&line));
        }
        match self.rest.len() + self.event.data.len() > self.limit {
            true => Err(TooLong),
            false => Ok(events),
        }
    }

    fn line(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            return std::mem::take(&mut self.has_data).then_some(event);
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.event.name),
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.has_data = true;
                self.event.data.push_str(value);
            }
            // Ids and times to reconnect are of no use here; the rest are comments.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_however_the_bytes_are_cut() {
        let text = b": hello\r\nevent: message\r\ndata: {\"a\":\r\ndata: 1}\r\n\r\ndata:x\n\nevent: none\n\n";
        let whole = Parser::new(100).push(text).unwrap();
        let mut parser = Parser::new(100);
        let single: Vec<_> = text.chunks(1).flat_map(|byte| parser.push(byte).unwrap()).collect();
        assert_eq!(whole, single);
        let data: Vec<_> = whole.iter().map(|event| event.data.as_str()).collect();
        assert_eq!(data, ["{\"a\":\n1}", "x"]);
    }

    #[test]
    fn an_event_without_an_end_is_not_waited_for() {
        let mut parser = Parser::new(1000);
        let endless = (0..1000).find_map(|_| parser.push(b"data: xxxxxxxxxxxxxxxxxxxxx\n").err());
        assert_eq!(endless, Some(TooLong));
        assert_eq!(Parser::new(10).push(&[b'x'; 11]), Err(TooLong));
    }
}
