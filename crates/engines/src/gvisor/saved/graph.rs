//! A graph of objects that describes itself: objects by number, fields by name.
//!
//! ```text
//!   count of objects
//!   types     name, names of the fields; numbered from 1 in this order
//!   objects   number, value; in rising order, the first is the root
//! ```
//!
//! Only an index is kept; an object is decoded when it is asked for, again each time. A type or a
//! field that is not there is a [`Fault::Shape`] that names it.

use std::cell::Cell;
use std::ops::Range;

use torpor_protocol::Excerpt;

use super::fault::Fault;
use super::wire::{Items, Part, Pointer, Reader, Step, Value};

/// Types of one graph; a real one has about three hundred.
const TYPES_MAX: usize = 16 * 1024;
/// How many times its own size a graph may be decoded through pointers. Every object of a real one
/// is needed a few times; a forged one could have all of them point to the same large one.
const TURNS_MAX: u64 = 64;
/// The same, for graphs of next to no size.
const DECODED_MIN: u64 = 1 << 20;

pub(super) struct Graph<'a> {
    bytes: &'a [u8],
    types: Vec<Type<'a>>,
    /// Number and place of every object, by number.
    objects: Vec<(u32, u32)>,
    /// Bytes that may yet be decoded through pointers.
    allowance: Cell<u64>,
}

struct Type<'a> {
    name: &'a [u8],
    fields: Vec<&'a [u8]>,
}

/// A struct whose fields can be asked for.
pub(super) struct Fields<'g, 'a> {
    graph: &'g Graph<'a>,
    of: &'g Type<'a>,
    values: Vec<Value<'a>>,
}

impl<'a> Graph<'a> {
    /// Reads the `count` objects from `reader` on, which reads `bytes`.
    pub(super) fn read(
        bytes: &'a [u8],
        reader: &mut Reader<'a>,
        count: u64,
    ) -> Result<Self, Fault> {
        let allowance = Cell::new(bytes.len() as u64 * TURNS_MAX + DECODED_MIN);
        let mut graph = Self { bytes, types: Vec::new(), objects: Vec::new(), allowance };
        let narrow = |number: u64| {
            let refused = |_| Fault::Absurd(format!("an object has the number {number}"));
            u32::try_from(number).map_err(refused)
        };
        while (graph.objects.len() as u64) < count {
            match reader.part()? {
                Part::Type { name, fields } => {
                    if graph.types.len() == TYPES_MAX {
                        return Err(Fault::Absurd(format!("it has over {TYPES_MAX} types")));
                    }
                    graph.types.push(Type { name, fields });
                }
                Part::Object { id, at } => {
                    let object = (narrow(id)?, narrow(at as u64)?);
                    if graph.objects.last().is_some_and(|last| last.0 >= object.0) {
                        return Err(Fault::Absurd("its objects are not in order".into()));
                    }
                    graph.objects.push(object);
                }
            }
        }
        Ok(graph)
    }

    /// The name of the root's type, if it is a struct.
    pub(super) fn root_type(&self) -> Result<Option<&'a [u8]>, Fault> {
        let Some(&(_, at)) = self.objects.first() else { return Ok(None) };
        let number = Reader::from(self.bytes, at as usize).peek_struct()?;
        Ok(number.and_then(|number| self.type_of(number).ok()).map(|of| of.name))
    }

    pub(super) fn root(&self) -> Result<Fields<'_, 'a>, Fault> {
        let Some(&(_, at)) = self.objects.first() else {
            return Err(Fault::Absurd("it has no objects".into()));
        };
        self.fields(Reader::from(self.bytes, at as usize).value()?)
    }

    /// All objects of a type.
    pub(super) fn instances(
        &self,
        name: &str,
    ) -> Result<impl Iterator<Item = Result<Fields<'_, 'a>, Fault>>, Fault> {
        let known = self.types.iter().position(|of| of.name == name.as_bytes());
        let known = known.ok_or_else(|| Fault::Shape(format!("there is no type {name}")))?;
        let wanted = known as u64 + 1;
        Ok(self.objects.iter().filter_map(move |&(_, at)| {
            let mut reader = Reader::from(self.bytes, at as usize);
            let is = reader.peek_struct().map(|number| number == Some(wanted));
            let fields = || self.fields(reader.value()?);
            is.map_or_else(|fault| Some(Err(fault)), |is| is.then(fields))
        }))
    }

    /// Numbers of the objects of a type; none if nothing was of that type.
    pub(super) fn numbers(&self, name: &str) -> impl Iterator<Item = u64> {
        let wanted = self.types.iter().position(|of| of.name == name.as_bytes());
        let wanted = wanted.map(|index| index as u64 + 1);
        self.objects.iter().filter_map(move |&(id, at)| {
            let kind = Reader::from(self.bytes, at as usize).peek_struct().ok().flatten();
            (kind.is_some() && kind == wanted).then_some(u64::from(id))
        })
    }

    /// An object of [`Self::numbers`].
    pub(super) fn object(&self, number: u64) -> Result<Fields<'_, 'a>, Fault> {
        let (_, value) = self.whole(number)?;
        self.fields(value)
    }

    /// Where in the bytes the number in a field of an object is; None: it is left out, being 0.
    pub(super) fn number_at(&self, object: u64, name: &str) -> Result<Option<Range<usize>>, Fault> {
        let (_, value) = self.whole(object)?;
        let Value::Struct(of) = value else {
            return Err(Fault::Absurd("what should be a struct is none".into()));
        };
        of.number_at(self.type_of(of.kind)?.field(name.as_bytes())?)
    }

    /// What a pointer points to.
    pub(super) fn follow(&self, pointer: Pointer<'a>) -> Result<Value<'a>, Fault> {
        let (length, mut value) = self.whole(pointer.object)?;
        let left = self.allowance.get().checked_sub(length);
        let left = left.ok_or_else(|| Fault::Absurd("it goes in circles".into()))?;
        self.allowance.set(left);
        for step in pointer.steps()? {
            let Step::Field(name) = step else {
                return Err(Fault::Shape("something is in an array that should not be".into()));
            };
            value = self.fields(value)?.get(name)?;
        }
        Ok(value)
    }

    /// The value of an object, and how many bytes it has.
    fn whole(&self, number: u64) -> Result<(u64, Value<'a>), Fault> {
        let found = self.objects.binary_search_by_key(&number, |&(id, _)| u64::from(id));
        let Ok(index) = found else {
            return Err(Fault::Absurd(format!("there is no object {number}")));
        };
        let mut reader = Reader::from(self.bytes, self.objects[index].1 as usize);
        let begun = reader;
        let value = reader.value()?;
        Ok((reader.distance(&begun), value))
    }

    /// The fields of a struct, or of the struct a pointer points to.
    pub(super) fn fields(&self, value: Value<'a>) -> Result<Fields<'_, 'a>, Fault> {
        let value = if let Value::Pointer(pointer) = value { self.follow(pointer)? } else { value };
        let Value::Struct(of) = value else {
            return Err(Fault::Absurd("what should be a struct is none".into()));
        };
        let (values, of) = (of.values()?, self.type_of(of.kind)?);
        if values.len() != of.fields.len() {
            let name = Excerpt::of(of.name);
            return Err(Fault::Absurd(format!("a {name} has {} fields", values.len())));
        }
        Ok(Fields { graph: self, of, values })
    }

    /// The name of a memory file: a text, or since 2026 the names of its container and its path.
    pub(super) fn owner(&self, value: Value<'a>) -> Result<Vec<u8>, Fault> {
        if let Value::Text(text) = value {
            return Ok(text.to_vec());
        }
        if matches!(value, Value::Nil) {
            return Ok(Vec::new());
        }
        let of = self.fields(value)?;
        Ok([of.text("ContainerName")?, b":", of.text("Path")?].concat())
    }

    fn type_of(&self, number: u64) -> Result<&Type<'a>, Fault> {
        let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
        let of = index.and_then(|index| self.types.get(index));
        of.ok_or_else(|| Fault::Absurd(format!("there is no type {number}")))
    }
}

impl Type<'_> {
    /// The place of a field among the others.
    fn field(&self, name: &[u8]) -> Result<usize, Fault> {
        self.fields.iter().position(|field| *field == name).ok_or_else(|| {
            let (of, name) = (Excerpt::of(self.name), Excerpt::of(name));
            Fault::Shape(format!("{of} has no field {name}"))
        })
    }
}

impl<'g, 'a> Fields<'g, 'a> {
    pub(super) fn is(&self, name: &str) -> bool {
        self.of.name == name.as_bytes()
    }

    fn get(&self, name: &[u8]) -> Result<Value<'a>, Fault> {
        Ok(self.values[self.of.field(name)?])
    }

    /// A number, bare or in the struct that makes it atomic.
    fn plain(&self, name: &str) -> Result<Value<'a>, Fault> {
        let value = self.get(name.as_bytes())?;
        let Value::Struct(_) = value else { return Ok(value) };
        let inner = self.graph.fields(value)?;
        if !inner.of.name.starts_with(b"pkg/atomicbitops.") {
            return Err(self.strange(name));
        }
        inner.get(b"value")
    }

    fn strange(&self, name: &str) -> Fault {
        let of = Excerpt::of(self.of.name);
        Fault::Shape(format!("{of} has a field {name} of another type"))
    }

    /// The fault for a value of another type, unless it was left out.
    fn left_out<T: Default>(&self, name: &str, value: Value<'a>) -> Result<T, Fault> {
        if matches!(value, Value::Nil) { Ok(T::default()) } else { Err(self.strange(name)) }
    }

    pub(super) fn uint(&self, name: &str) -> Result<u64, Fault> {
        let value = self.plain(name)?;
        if let Value::Uint(number) = value { Ok(number) } else { self.left_out(name, value) }
    }

    pub(super) fn int(&self, name: &str) -> Result<i64, Fault> {
        let value = self.plain(name)?;
        if let Value::Int(number) = value { Ok(number) } else { self.left_out(name, value) }
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool, Fault> {
        let value = self.plain(name)?;
        if let Value::Bool(flag) = value { Ok(flag) } else { self.left_out(name, value) }
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a [u8], Fault> {
        let value = self.plain(name)?;
        if let Value::Text(text) = value { Ok(text) } else { self.left_out(name, value) }
    }

    /// See [`Graph::owner`].
    pub(super) fn owner(&self, name: &str) -> Result<Vec<u8>, Fault> {
        self.graph.owner(self.get(name.as_bytes())?)
    }

    pub(super) fn pointer(&self, name: &str) -> Result<Pointer<'a>, Fault> {
        let value = self.get(name.as_bytes())?;
        if let Value::Pointer(pointer) = value { Ok(pointer) } else { Err(self.strange(name)) }
    }

    /// Whether the field points to nothing.
    pub(super) fn is_nil(&self, name: &str) -> Result<bool, Fault> {
        let value = self.get(name.as_bytes())?;
        Ok(matches!(value, Value::Nil | Value::Pointer(Pointer { object: 0, .. })))
    }

    /// The struct that the field is or points to.
    pub(super) fn inner(&self, name: &str) -> Result<Fields<'g, 'a>, Fault> {
        self.graph.fields(self.get(name.as_bytes())?)
    }

    /// The map that the field points to, if any.
    pub(super) fn map(&self, name: &str) -> Result<Option<Items<'a>>, Fault> {
        let value = self.get(name.as_bytes())?;
        let Value::Pointer(pointer) = value else { return self.left_out(name, value) };
        if pointer.object == 0 {
            return Ok(None);
        }
        let Value::Map(items) = self.graph.follow(pointer)? else { return Err(self.strange(name)) };
        Ok(Some(items))
    }

    /// The elements of the slice that the field is.
    pub(super) fn list(
        &self,
        name: &str,
    ) -> Result<impl Iterator<Item = Result<Value<'a>, Fault>> + use<'a>, Fault> {
        let value = self.get(name.as_bytes())?;
        let (length, items) = if let Value::Slice { length, array } = value
            && length > 0
        {
            let array = self.graph.follow(array)?;
            let Value::Array(items) = array else { return Err(self.strange(name)) };
            (length, items)
        } else {
            if !matches!(value, Value::Slice { .. }) {
                self.left_out::<()>(name, value)?;
            }
            (0, Items::NONE)
        };
        Ok(items.elements().take(usize::try_from(length).unwrap_or(usize::MAX)))
    }
}
