//! Writes graphs as the sentry does, and some that it never would.

/// An encoded value.
pub(super) type Bytes = Vec<u8>;

pub(super) fn number(mut number: u64) -> Bytes {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn counted(text: &[u8]) -> Bytes {
    [number(text.len() as u64), text.to_vec()].concat()
}

pub(super) fn nil() -> Bytes {
    vec![5]
}

pub(super) fn int(value: i64) -> Bytes {
    let doubled = (value as u64) << 1;
    [vec![1], number(if value < 0 { !doubled } else { doubled })].concat()
}

pub(super) fn uint(value: u64) -> Bytes {
    [vec![2], number(value)].concat()
}

pub(super) fn text(text: &[u8]) -> Bytes {
    [vec![7], counted(text)].concat()
}

pub(super) fn pointer(object: u64) -> Bytes {
    [vec![6], number(object), number(0)].concat()
}

/// To a field of an object.
pub(super) fn pointer_into(object: u64, field: &str) -> Bytes {
    let length = field.len() as u64 * 2 - 1;
    let steps = [number(1), number(length), field.as_bytes().to_vec(), vec![0, 1]].concat();
    [vec![6], number(object), steps].concat()
}

pub(super) fn slice(length: u64, array: u64) -> Bytes {
    [vec![8], number(length), number(length), number(array), number(0)].concat()
}

/// All of one kind, which is that of the first.
pub(super) fn array(elements: &[Bytes]) -> Bytes {
    let mut bytes = [vec![9], number(elements.len() as u64)].concat();
    for (index, element) in elements.iter().enumerate() {
        bytes.extend(&element[usize::from(index > 0)..]);
    }
    bytes
}

pub(super) fn map(pairs: &[(Bytes, Bytes)]) -> Bytes {
    let mut bytes = [vec![10], number(pairs.len() as u64)].concat();
    for (index, (key, value)) in pairs.iter().enumerate() {
        bytes.extend(&key[usize::from(index > 0)..]);
        bytes.extend(&value[usize::from(index > 0)..]);
    }
    bytes
}

pub(super) fn flag(flag: bool) -> Bytes {
    vec![0, u8::from(flag)]
}

/// Types and objects on their way to a stream.
#[derive(Clone, Default)]
pub(super) struct Encoder {
    types: Vec<(String, Vec<String>)>,
    objects: Vec<Bytes>,
}

impl Encoder {
    /// A struct with named fields; all of one type have the same.
    pub(super) fn structure(&mut self, name: &str, fields: &[(&str, Bytes)]) -> Bytes {
        let names = fields.iter().map(|field| field.0.to_owned()).collect();
        let known = self.types.iter().position(|of| of.0 == name);
        let index = known.unwrap_or_else(|| {
            self.types.push((name.to_owned(), names));
            self.types.len() - 1
        });
        let mut bytes = [vec![11], number(index as u64 + 1)].concat();
        match fields {
            [] => bytes.push(12),
            [one] => bytes.extend(&one.1),
            many => {
                bytes.extend([vec![13], number(many.len() as u64)].concat());
                many.iter().for_each(|field| bytes.extend(&field.1));
            }
        }
        bytes
    }

    /// Makes place for an object that others may point to already.
    pub(super) fn reserve(&mut self) -> u64 {
        self.objects.push(nil());
        self.objects.len() as u64
    }

    pub(super) fn put(&mut self, id: u64, value: Bytes) {
        self.objects[id as usize - 1] = value;
    }

    pub(super) fn object(&mut self, value: Bytes) -> u64 {
        let id = self.reserve();
        self.put(id, value);
        id
    }

    pub(super) fn stream(&self) -> Bytes {
        let mut bytes = number(1 << 63 | self.objects.len() as u64);
        for (name, fields) in &self.types {
            bytes
                .extend([vec![17], counted(name.as_bytes()), number(fields.len() as u64)].concat());
            fields.iter().for_each(|field| bytes.extend(counted(field.as_bytes())));
        }
        for (index, object) in self.objects.iter().enumerate() {
            bytes.extend(uint(index as u64 + 1));
            bytes.extend(object);
        }
        bytes
    }
}
