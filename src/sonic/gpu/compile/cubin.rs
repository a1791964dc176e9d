//! Machine code of one kernel: an ELF file, of which a few symbols are read.

use crate::error::{Error, Result};

/// A compiled kernel, checked to be an ELF file for CUDA devices.
#[derive(Clone, PartialEq, Eq)]
pub struct Cubin(Vec<u8>);

/// What a grouped GEMM says about its own launch: the array `launch_geometry` of its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// Rows of an output tile.
    pub tile_m: u32,
    /// Columns of an output tile.
    pub tile_n: u32,
    /// Depth of one stage.
    pub tile_k: u32,
    /// Rows of the box of A's tensor map; 0 where A is gathered.
    pub a_box_rows: u32,
    /// Rows of the box of B's tensor map.
    pub b_box_rows: u32,
    /// Whether B lies (E, k, n) rather than (E, n, k).
    pub b_is_mn_major: bool,
    /// Stages of the operand ring.
    pub stages: u32,
    /// Columns of the box of h's tensor map; 0 where h is not read.
    pub h_box_columns: u32,
    /// Columns of the box of the result's tensor map; 0 where the result is not stored through one.
    pub out_box_columns: u32,
    /// Columns of the box of a's or a′'s tensor map; 0 where there is none.
    pub activation_box_columns: u32,
}

impl Cubin {
    /// Checks that `bytes` are an ELF file (64 bits, little endian) for CUDA.
    ///
    /// # Errors
    /// The first thing that is not so.
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        const MACHINE_CUDA: u16 = 190;
        let cubin = Self(bytes);
        if cubin.0.get(..6) != Some(b"\x7fELF\x02\x01") {
            return Err(Error::internal("a compiled kernel is no 64-bit little-endian ELF file"));
        }
        if cubin.u16(18)? != MACHINE_CUDA {
            return Err(Error::internal("a compiled kernel is an ELF file for another machine than CUDA"));
        }
        Ok(cubin)
    }

    /// The file.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether it defines `name`.
    ///
    /// # Errors
    /// A malformed file.
    pub fn defines(&self, name: &str) -> Result<bool> {
        Ok(self.symbol(name)?.is_some())
    }

    /// The geometry that the module declares, if it declares one.
    ///
    /// # Errors
    /// A malformed file, or an array of another length.
    pub fn geometry(&self) -> Result<Option<Geometry>> {
        let Some(bytes) = self.symbol("launch_geometry")? else { return Ok(None) };
        let words: Vec<u32> =
            bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
        // The words of kernels/sm90/launch.cuh.
        let [
            threads,
            shared_bytes,
            cluster,
            tile_m,
            tile_n,
            tile_k,
            a_box_rows,
            b_box_rows,
            mn_major,
            stages,
            h_box_columns,
            out_box_columns,
            activation_box_columns,
        ] = words[..]
        else {
            return Err(Error::internal(format!("`launch_geometry` of a kernel has {} words, not 13", words.len())));
        };
        Ok(Some(Geometry {
            threads,
            shared_bytes,
            cluster,
            tile_m,
            tile_n,
            tile_k,
            a_box_rows,
            b_box_rows,
            b_is_mn_major: mn_major != 0,
            stages,
            h_box_columns,
            out_box_columns,
            activation_box_columns,
        }))
    }

    /// The initial bytes of a symbol that has some.
    fn symbol(&self, name: &str) -> Result<Option<&[u8]>> {
        const SYMBOL_TABLE: u32 = 2;
        const SYMBOL_BYTES: usize = 24;
        for index in 0..usize::from(self.u16(60)?) {
            let table = self.section(index)?;
            if table.kind != SYMBOL_TABLE {
                continue;
            }
            let names = self.section(table.link)?;
            for symbol in (table.offset..table.offset + table.size).step_by(SYMBOL_BYTES) {
                let at = names.offset + self.u32(symbol)? as usize;
                let found = self.0.get(at..).and_then(|text| text.split(|&byte| byte == 0).next());
                let section = self.u16(symbol + 6)?;
                if found == Some(name.as_bytes()) && section != 0 {
                    let start = self.section(section.into())?.offset + self.u64(symbol + 8)?;
                    let size = self.u64(symbol + 16)?;
                    return start
                        .checked_add(size)
                        .and_then(|end| self.0.get(start..end))
                        .map(Some)
                        .ok_or_else(|| malformed(start));
                }
            }
        }
        Ok(None)
    }

    fn section(&self, index: usize) -> Result<Section> {
        let header = self.u64(40)? + index * usize::from(self.u16(58)?);
        let section = Section {
            kind: self.u32(header + 4)?,
            offset: self.u64(header + 24)?,
            size: self.u64(header + 32)?,
            link: self.u32(header + 40)? as usize,
        };
        // Every later sum of an offset and a size stays far from an overflow.
        if section.offset > self.0.len() || section.size > u32::MAX as usize {
            return Err(malformed(header));
        }
        Ok(section)
    }

    fn u16(&self, at: usize) -> Result<u16> {
        self.number(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32> {
        self.number(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize) -> Result<usize> {
        let value = self.number(at).map(u64::from_le_bytes)?;
        usize::try_from(value).ok().filter(|value| *value <= isize::MAX as usize / 4).ok_or_else(|| malformed(at))
    }

    fn number<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        self.0.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or_else(|| malformed(at))
    }
}

struct Section {
    kind: u32,
    offset: usize,
    size: usize,
    link: usize,
}

fn malformed(at: usize) -> Error {
    Error::internal(format!("a compiled kernel is malformed near byte {at}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_cubin_are_refused() {
        for bytes in [&b""[..], b"\x7fELF", b"\x7fELF\x02\x01", &[0; 64]] {
            assert!(Cubin::new(bytes.to_vec()).is_err());
        }
    }

    #[test]
    fn a_cut_or_garbled_file_is_an_error_and_no_panic() {
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        file[18] = 190;
        assert!(Cubin::new(file.clone()).unwrap().symbol("f").unwrap().is_none());
        for at in 20..64 {
            let mut garbled = file.clone();
            garbled[at] = 0xff;
            garbled[60] = 9;
            let _ = Cubin::new(garbled).unwrap().geometry();
        }
    }
}
