//! Plans, made before anything is read: which ranks a node serves, which layers and experts each of
//! them holds, where a rank's tensors lie in its region, and which bytes of which file go where.

pub mod cast;
pub mod experts;
pub mod pipeline;
pub mod placement;
pub mod read;
pub mod region;
