//! PyTorch snapshots as a test writes them.
#![allow(unreachable_pub, reason = "a module of several test binaries")]

/// Opcodes of a pickle of plain data, enough to write snapshots.
pub enum Py<'a> {
    Int(u64),
    Text(&'a str),
    List(Vec<Py<'a>>),
    Dict(Vec<(&'a str, Py<'a>)>),
}

impl Py<'_> {
    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Py::Int(int) => {
                to.extend([0x8a, 9]);
                to.extend(int.to_le_bytes());
                to.push(0);
            }
            Py::Text(text) => {
                to.extend([0x8c, text.len() as u8]);
                to.extend(text.as_bytes());
            }
            Py::List(items) => {
                to.extend(b"](");
                items.iter().for_each(|item| item.write(to));
                to.push(b'e');
            }
            Py::Dict(pairs) => {
                to.extend(b"}(");
                for (key, value) in pairs {
                    Py::Text(key).write(to);
                    value.write(to);
                }
                to.push(b'u');
            }
        }
    }

    pub fn pickle(&self) -> Vec<u8> {
        let mut bytes = vec![0x80, 4];
        self.write(&mut bytes);
        bytes.push(b'.');
        bytes
    }
}

/// An entry of a history, on stream 5.
pub fn entry(action: &str, addr: u64, size: u64, time_us: u64) -> Py<'_> {
    let int = Py::Int;
    Py::Dict(vec![
        ("action", Py::Text(action)),
        ("addr", int(addr)),
        ("size", int(size)),
        ("stream", int(5)),
        ("time_us", int(time_us)),
    ])
}
