//! Host memory that is really remapped: what the heap runs on where there is no GPU.

mod physical;
mod streams;
mod table;
mod worker;
