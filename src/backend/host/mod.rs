//! Host memory that is really remapped: what the heap runs on where there is no GPU.

mod physical;
mod table;
