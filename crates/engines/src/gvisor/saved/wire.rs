//! The encoding of gVisor's object graphs, value by value.
//!
//! ```text
//!   number   7 bits per byte, lowest first, the top bit says that more follow
//!   signed   a number: twice the value, or its complement if negative
//!   text     length, bytes
//!   value    kind, then by kind:
//!     array    count, kind of all elements, elements without their kinds
//!     map      the same with pairs
//!     struct   number of its type; then no fields, or one value, or count and values
//!     pointer  number of an object (0: none), count and steps from there to a part of it
//!     slice    length, capacity, pointer to an array
//!     any      description of a type, value
//! ```
//!
//! What is read was written beside hostile code, so nothing is taken on trust:
//! - composite values are only stepped over and hold the place where they begin: reading allocates
//!   nothing, whatever a length says;
//! - a count is at most the number of bytes that are left, and every turn of a loop takes one;
//! - nesting is bounded ([`DEPTH_MAX`]).

use std::ops::Range;

use super::fault::Fault;

/// Values within values; those of real saves are about ten deep.
const DEPTH_MAX: usize = 64;
/// Fields of one struct; the largest has about fifty.
pub(super) const FIELDS_MAX: u64 = 512;
/// Steps of one pointer.
const STEPS_MAX: u64 = 32;

/// Kinds of values.
mod kind {
    pub(super) const BOOL: u64 = 0;
    pub(super) const INT: u64 = 1;
    pub(super) const UINT: u64 = 2;
    pub(super) const FLOAT32: u64 = 3;
    pub(super) const FLOAT64: u64 = 4;
    pub(super) const NIL: u64 = 5;
    pub(super) const POINTER: u64 = 6;
    pub(super) const TEXT: u64 = 7;
    pub(super) const SLICE: u64 = 8;
    pub(super) const ARRAY: u64 = 9;
    pub(super) const MAP: u64 = 10;
    pub(super) const STRUCT: u64 = 11;
    pub(super) const NO_FIELDS: u64 = 12;
    pub(super) const FIELDS: u64 = 13;
    pub(super) const ANY: u64 = 14;
    pub(super) const COMPLEX64: u64 = 15;
    pub(super) const COMPLEX128: u64 = 16;
    pub(super) const TYPE: u64 = 17;
}

/// A place in encoded bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// A value; what a zero of its type is, the encoder may have left out as `Nil`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    Nil,
    Bool(bool),
    Int(i64),
    Uint(u64),
    /// A broken number: nothing here needs it.
    Real,
    Text(&'a [u8]),
    Pointer(Pointer<'a>),
    Slice {
        length: u64,
        array: Pointer<'a>,
    },
    Array(Items<'a>),
    Map(Items<'a>),
    Struct(Struct<'a>),
}

/// A reference to an object, or to a part of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pointer<'a> {
    /// 0 is nothing.
    pub(super) object: u64,
    count: u64,
    steps: Reader<'a>,
}

/// One step from an object to a part of it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step<'a> {
    /// Of an array.
    Element,
    Field(&'a [u8]),
}

/// The elements of an array or the pairs of a map, still encoded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Items<'a> {
    count: u64,
    reader: Reader<'a>,
}

/// A struct, its fields still encoded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Struct<'a> {
    /// Number of its type, from 1; 0 is an empty struct without a type.
    pub(super) kind: u64,
    fields: Reader<'a>,
}

/// What a stream of objects consists of.
pub(super) enum Part<'a> {
    Type { name: &'a [u8], fields: Vec<&'a [u8]> },
    Object { id: u64, at: usize },
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn from(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at: at.min(bytes.len()) }
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// How far this is after `begun`.
    pub(super) fn distance(&self, begun: &Self) -> u64 {
        self.at.saturating_sub(begun.at) as u64
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn damaged(&self, what: &'static str) -> Fault {
        Fault::Damaged { what, at: self.at }
    }

    pub(super) fn number(&mut self) -> Result<u64, Fault> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let Some(&byte) = self.bytes.get(self.at) else {
                return Err(self.damaged("it ends too early"));
            };
            self.at += 1;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                let overflows = shift == 63 && byte > 1;
                return if overflows {
                    Err(self.damaged("a number is too large"))
                } else {
                    Ok(number)
                };
            }
        }
        Err(self.damaged("a number has no end"))
    }

    fn signed(&mut self) -> Result<i64, Fault> {
        let number = self.number()?;
        let half = (number >> 1).cast_signed();
        Ok(if number & 1 == 0 { half } else { !half })
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], Fault> {
        if length > self.left() {
            return Err(self.damaged("a text is longer than what is left"));
        }
        let from = self.at;
        self.at += usize::try_from(length).expect("what is left fits");
        Ok(&self.bytes[from..self.at])
    }

    fn text(&mut self) -> Result<&'a [u8], Fault> {
        let length = self.number()?;
        self.take(length)
    }

    /// How many values follow; each takes a byte at least.
    fn count(&mut self, most: u64) -> Result<u64, Fault> {
        let count = self.number()?;
        if count > self.left().min(most) {
            return Err(self.damaged("a count is larger than what is left"));
        }
        Ok(count)
    }

    /// How many objects follow, or `Err` with how many raw bytes are elsewhere.
    pub(super) fn heading(&mut self) -> Result<Result<u64, u64>, Fault> {
        const OBJECTS: u64 = 1 << 63;
        let number = self.number()?;
        if number & OBJECTS == 0 {
            return Ok(Err(number));
        }
        let count = number & !OBJECTS;
        if count > self.left() {
            return Err(self.damaged("a count is larger than what is left"));
        }
        Ok(Ok(count))
    }

    /// The next type or object of a stream; an object is stepped over.
    pub(super) fn part(&mut self) -> Result<Part<'a>, Fault> {
        match self.number()? {
            kind::TYPE => {
                let name = self.text()?;
                let count = self.count(FIELDS_MAX)?;
                let fields = (0..count).map(|_| self.text()).collect::<Result<_, _>>()?;
                Ok(Part::Type { name, fields })
            }
            kind::UINT => {
                let id = self.number()?;
                let at = self.at;
                let kind = self.number()?;
                self.skip(kind, 0)?;
                Ok(Part::Object { id, at })
            }
            _ => Err(self.damaged("neither a type nor an object")),
        }
    }

    /// The number of the type, if a struct is here.
    pub(super) fn peek_struct(mut self) -> Result<Option<u64>, Fault> {
        if self.number()? == kind::STRUCT { self.number().map(Some) } else { Ok(None) }
    }

    pub(super) fn value(&mut self) -> Result<Value<'a>, Fault> {
        let kind = self.number()?;
        self.body(kind, 0)
    }

    /// The value of `kind` that begins here.
    fn body(&mut self, kind: u64, depth: usize) -> Result<Value<'a>, Fault> {
        let mut inside = *self;
        if kind != kind::ANY {
            self.skip(kind, depth)?;
        }
        Ok(match kind {
            kind::NIL => Value::Nil,
            kind::BOOL => Value::Bool(inside.number()? == 1),
            kind::INT => Value::Int(inside.signed()?),
            kind::UINT => Value::Uint(inside.number()?),
            kind::FLOAT32 | kind::FLOAT64 | kind::COMPLEX64 | kind::COMPLEX128 => Value::Real,
            kind::TEXT => Value::Text(inside.text()?),
            kind::POINTER => Value::Pointer(inside.pointer()?),
            kind::SLICE => {
                let length = inside.number()?;
                inside.number()?;
                Value::Slice { length, array: inside.pointer()? }
            }
            kind::ARRAY => Value::Array(inside.items()?),
            kind::MAP => Value::Map(inside.items()?),
            kind::STRUCT => Value::Struct(Struct { kind: inside.number()?, fields: inside }),
            kind::ANY => {
                self.deeper(depth)?;
                self.skip_description(depth)?;
                let inner = self.number()?;
                self.body(inner, depth + 1)?
            }
            _ => return Err(self.damaged("an unknown kind of value")),
        })
    }

    fn items(mut self) -> Result<Items<'a>, Fault> {
        let count = self.count(u64::MAX)?;
        Ok(Items { count, reader: self })
    }

    fn pointer(&mut self) -> Result<Pointer<'a>, Fault> {
        let object = self.number()?;
        let count = self.count(STEPS_MAX)?;
        let steps = *self;
        for _ in 0..count {
            self.step()?;
        }
        if count > 0 {
            self.skip_description(0)?;
        }
        Ok(Pointer { object, count, steps })
    }

    fn step(&mut self) -> Result<Step<'a>, Fault> {
        let number = self.signed()?;
        if number < 0 {
            return self.take(number.unsigned_abs()).map(Step::Field);
        }
        Ok(Step::Element)
    }

    fn deeper(&self, depth: usize) -> Result<(), Fault> {
        if depth < DEPTH_MAX { Ok(()) } else { Err(self.damaged("it is nested too deeply")) }
    }

    /// Steps over a value of `kind`.
    fn skip(&mut self, kind: u64, depth: usize) -> Result<(), Fault> {
        self.deeper(depth)?;
        match kind {
            kind::NIL => {}
            kind::BOOL | kind::INT | kind::UINT | kind::FLOAT32 | kind::FLOAT64 => {
                self.number()?;
            }
            kind::COMPLEX64 | kind::COMPLEX128 => {
                self.number()?;
                self.number()?;
            }
            kind::TEXT => {
                self.text()?;
            }
            kind::POINTER => {
                self.pointer()?;
            }
            kind::SLICE => {
                self.number()?;
                self.number()?;
                self.pointer()?;
            }
            kind::ARRAY => self.skip_array(depth)?,
            kind::MAP => self.skip_map(depth)?,
            kind::STRUCT => self.skip_struct(depth)?,
            kind::ANY => {
                self.skip_description(depth)?;
                let inner = self.number()?;
                self.skip(inner, depth + 1)?;
            }
            _ => return Err(self.damaged("an unknown kind of value")),
        }
        Ok(())
    }

    fn skip_array(&mut self, depth: usize) -> Result<(), Fault> {
        let count = self.count(u64::MAX)?;
        if count == 0 {
            return Ok(());
        }
        let kind = self.number()?;
        if kind == kind::NIL {
            // The only elements without bytes.
            return Ok(());
        }
        (0..count).try_for_each(|_| self.skip(kind, depth + 1))
    }

    fn skip_map(&mut self, depth: usize) -> Result<(), Fault> {
        let count = self.count(u64::MAX)?;
        if count == 0 {
            return Ok(());
        }
        let key = self.number()?;
        self.skip(key, depth + 1)?;
        let value = self.number()?;
        self.skip(value, depth + 1)?;
        if key == kind::NIL && value == kind::NIL {
            return Ok(());
        }
        (1..count).try_for_each(|_| {
            self.skip(key, depth + 1)?;
            self.skip(value, depth + 1)
        })
    }

    fn skip_struct(&mut self, depth: usize) -> Result<(), Fault> {
        self.number()?;
        match self.number()? {
            kind::NO_FIELDS => Ok(()),
            kind::FIELDS => {
                let count = self.count(FIELDS_MAX)?;
                (0..count).try_for_each(|_| {
                    let kind = self.number()?;
                    self.skip(kind, depth + 1)
                })
            }
            kind => self.skip(kind, depth + 1),
        }
    }

    /// Steps over the description of a type.
    fn skip_description(&mut self, depth: usize) -> Result<(), Fault> {
        const NUMBER: u64 = 0;
        const POINTER: u64 = 1;
        const ARRAY: u64 = 2;
        const SLICE: u64 = 3;
        const MAP: u64 = 4;
        const NOTHING: u64 = 5;
        self.deeper(depth)?;
        match self.number()? {
            NUMBER => self.number().map(drop),
            POINTER | SLICE => self.skip_description(depth + 1),
            ARRAY => {
                self.number()?;
                self.skip_description(depth + 1)
            }
            MAP => {
                self.skip_description(depth + 1)?;
                self.skip_description(depth + 1)
            }
            NOTHING => Ok(()),
            _ => Err(self.damaged("an unknown description of a type")),
        }
    }
}

impl<'a> Pointer<'a> {
    /// From the object to the part that is meant.
    pub(super) fn steps(&self) -> Result<Vec<Step<'a>>, Fault> {
        let mut reader = self.steps;
        let mut steps = (0..self.count).map(|_| reader.step()).collect::<Result<Vec<_>, _>>()?;
        // They are written from the inside out.
        steps.reverse();
        Ok(steps)
    }
}

impl<'a> Struct<'a> {
    /// Where the number in a field is, if it is one that is not left out.
    pub(super) fn number_at(&self, field: usize) -> Result<Option<Range<usize>>, Fault> {
        let mut reader = self.fields;
        if reader.number()? != kind::FIELDS || reader.count(FIELDS_MAX)? <= field as u64 {
            return Ok(None);
        }
        for _ in 0..field {
            reader.value()?;
        }
        if reader.number()? != kind::UINT {
            return Ok(None);
        }
        let from = reader.at;
        reader.number()?;
        Ok(Some(from..reader.at))
    }

    pub(super) fn values(&self) -> Result<Vec<Value<'a>>, Fault> {
        let mut reader = self.fields;
        match reader.number()? {
            kind::NO_FIELDS => Ok(Vec::new()),
            kind::FIELDS => {
                let count = reader.count(FIELDS_MAX)?;
                (0..count).map(|_| reader.value()).collect()
            }
            kind => Ok(vec![reader.body(kind, 0)?]),
        }
    }
}

impl<'a> Items<'a> {
    pub(super) const NONE: Self = Self { count: 0, reader: Reader { bytes: &[], at: 0 } };

    pub(super) fn elements(mut self) -> impl Iterator<Item = Result<Value<'a>, Fault>> {
        let mut kind = None;
        std::iter::from_fn(move || {
            self.count = self.count.checked_sub(1)?;
            let element = self.next(&mut kind);
            if element.is_err() {
                self.count = 0;
            }
            Some(element)
        })
    }

    pub(super) fn pairs(mut self) -> impl Iterator<Item = Result<(Value<'a>, Value<'a>), Fault>> {
        let (mut keys, mut values) = (None, None);
        std::iter::from_fn(move || {
            self.count = self.count.checked_sub(1)?;
            let pair = self.next(&mut keys).and_then(|key| Ok((key, self.next(&mut values)?)));
            if pair.is_err() {
                self.count = 0;
            }
            Some(pair)
        })
    }

    /// The first element says its kind, the others are like it.
    fn next(&mut self, kind: &mut Option<u64>) -> Result<Value<'a>, Fault> {
        let kind = match *kind {
            Some(kind) => kind,
            None => *kind.insert(self.reader.number()?),
        };
        self.reader.body(kind, 0)
    }
}
