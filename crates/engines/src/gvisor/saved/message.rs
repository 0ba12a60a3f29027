//! Protocol buffers, as far as saves have them: numbers, and bytes that may be messages themselves.

use super::fault::Fault;

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message in their order, with their numbers. After a fault there are no more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Field::Number(self.number()?),
            2 => {
                let length = usize::try_from(self.number()?).ok()?;
                let (bytes, rest) = self.0.split_at_checked(length)?;
                self.0 = rest;
                Field::Bytes(bytes)
            }
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), Fault>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field.ok_or_else(|| Fault::Absurd("a message about memory is cut".into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_bytes_are_read_and_the_rest_is_refused() {
        let fields = |bytes| Fields::of(bytes).collect::<Result<Vec<_>, _>>();
        let read = fields(&[0x08, 0x96, 0x01, 0x12, 2, b'h', b'i']).unwrap();
        assert_eq!(read, [(1, Field::Number(150)), (2, Field::Bytes(b"hi"))]);
        assert_eq!(fields(&[]).unwrap(), []);
        // Cut in a number, cut in bytes, of another kind, a number without end.
        for bad in
            [&[0x08, 0x96][..], &[0x12, 3, b'h'], &[0x0d, 0, 0, 0, 0], &[0x08; 1], &[0xff; 12]]
        {
            assert!(fields(bad).is_err(), "{bad:?}");
        }
    }
}
