//! Physical handles and the page table: which handle lies behind which granule of addresses.
//!
//! All of it is guarded by the heap's driver lock. The sets of granules say what a granule is:
//! `mapped` (memory that blocks may use), `zombie` (still mapped, but its memory was given to another
//! address), `lent` (mapped, but used through the other mapping of a joined handle) and `pinned` (something outside holds
//! the address: it is never backed anew).
#![forbid(unsafe_code)]

use crate::backend::PhysicalAllocation;
use crate::bits::PageSet;
use crate::edges::Edges;
use crate::units::GRANULE;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Index of a handle; 0 is none.
pub(crate) type HandleId = u32;

/// What backs one granule of addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Page {
    /// 0: nothing.
    pub(crate) handle: HandleId,
    /// Granule within the handle.
    pub(crate) offset: u32,
}

/// Physical memory of one create call; sizes in granules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle {
    pub(crate) token: PhysicalAllocation,
    pub(crate) granules: u32,
    /// First granule of the mapping that blocks use; `None`: not mapped (cached, or it is once its zombies are gone).
    pub(crate) home: Option<u32>,
    /// Mappings left behind by moves, still mapped.
    pub(crate) zombies: u32,
    /// Its idle start or end is used at a second mapping ([`Join`]).
    pub(crate) joined: bool,
}

/// An old mapping of a moved handle, unmapped when its epoch has passed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zombie {
    pub(crate) handle: HandleId,
    pub(crate) at: u32,
    pub(crate) granules: u32,
    pub(crate) epoch: u32,
    /// Segment that the addresses belong to, and the node there.
    pub(crate) segment: u16,
    pub(crate) node: u32,
}

/// A second mapping of a handle, through which its idle start or end is used while the rest is used at its home.
#[derive(Debug, Clone)]
pub(crate) struct Join {
    pub(crate) handle: HandleId,
    /// Of the handle.
    pub(crate) granules: u32,
    /// First granule of the second mapping.
    pub(crate) at: u32,
    /// Granules of the handle, at its start or end, that are used here, and nowhere else.
    pub(crate) used: Range<u32>,
    /// Segment that the second mapping's addresses belong to, and the node there of what is not used here; 0 while the
    /// transaction is at work.
    pub(crate) segment: u16,
    pub(crate) shadow: u32,
    /// Segment of the home, and the node there of what is used here.
    pub(crate) home_segment: u16,
    pub(crate) lent: u32,
}

impl Join {
    /// Granules of addresses of the second mapping that are not usable.
    pub(crate) fn shadow_granules(&self) -> Range<u32> {
        if self.used.start > 0 {
            self.at..self.at + self.used.start
        } else {
            self.at + self.used.end..self.at + self.granules
        }
    }

    /// Those that are.
    pub(crate) fn used_granules(&self) -> Range<u32> {
        self.at + self.used.start..self.at + self.used.end
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Physical {
    pages: Vec<Page>,
    pub(crate) mapped: PageSet,
    pub(crate) zombie: PageSet,
    pub(crate) lent: PageSet,
    pub(crate) pinned: PageSet,
    handles: Vec<Option<Handle>>,
    unused: Vec<HandleId>,
    /// Handles without a mapping, by size.
    cache: BTreeMap<u32, Vec<HandleId>>,
    /// Granules of all handles that exist.
    reserved: u64,
    peak_reserved: u64,
    pub(crate) zombies: Vec<Zombie>,
    pub(crate) joins: Vec<Join>,
    edges: Arc<Edges>,
}

impl Physical {
    /// `edges` are kept up to date for those who do not hold the driver lock.
    pub(crate) fn new(edges: Arc<Edges>) -> Self {
        Self { edges, ..Self::default() }
    }

    /// Bytes of all handles that exist, mapped or not.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved * GRANULE
    }

    /// Most bytes that ever existed at once since the last reset.
    pub(crate) fn peak_reserved(&self) -> u64 {
        self.peak_reserved * GRANULE
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak_reserved = self.reserved;
    }

    pub(crate) fn page(&self, granule: u32) -> Page {
        self.pages.get(granule as usize).copied().unwrap_or_default()
    }

    pub(crate) fn handle(&self, id: HandleId) -> Option<&Handle> {
        self.handles.get(id as usize)?.as_ref()
    }

    /// Handles that exist.
    pub(crate) fn handles(&self) -> impl Iterator<Item = (HandleId, &Handle)> {
        self.handles.iter().enumerate().filter_map(|(id, handle)| Some((id as HandleId, handle.as_ref()?)))
    }

    /// Sizes of cached handles with how many there are.
    pub(crate) fn cached(&self) -> impl DoubleEndedIterator<Item = (u32, usize)> + '_ {
        self.cache.iter().map(|(granules, ids)| (*granules, ids.len()))
    }

    /// Takes a cached handle of exactly this size.
    pub(crate) fn take_cached(&mut self, granules: u32) -> Option<HandleId> {
        let ids = self.cache.get_mut(&granules)?;
        let id = ids.pop();
        if ids.is_empty() {
            self.cache.remove(&granules);
        }
        id
    }

    /// Puts an unmapped handle into the cache.
    pub(crate) fn put_cached(&mut self, id: HandleId) {
        if let Some(Some(handle)) = self.handles.get_mut(id as usize) {
            handle.home = None;
            let granules = handle.granules;
            self.cache.entry(granules).or_default().push(id);
        }
    }

    /// Forgets which handles are cached: at shutdown all of them are released.
    pub(crate) fn forget_cache(&mut self) {
        self.cache.clear();
    }

    /// Notes a created handle.
    pub(crate) fn created(&mut self, token: PhysicalAllocation, granules: u32) -> HandleId {
        self.reserved += u64::from(granules);
        self.peak_reserved = self.peak_reserved.max(self.reserved);
        let handle = Handle { token, granules, home: None, zombies: 0, joined: false };
        if let Some(id) = self.unused.pop() {
            self.handles[id as usize] = Some(handle);
            return id;
        }
        if self.handles.is_empty() {
            self.handles.push(None);
        }
        self.handles.push(Some(handle));
        (self.handles.len() - 1) as HandleId
    }

    /// Forgets a released handle, which has no mapping.
    pub(crate) fn released(&mut self, id: HandleId) {
        if let Some(handle) = self.handles.get_mut(id as usize).and_then(Option::take) {
            debug_assert!(handle.home.is_none() && handle.zombies == 0, "I7: only unmapped handles are released");
            self.reserved -= u64::from(handle.granules);
            self.unused.push(id);
        }
    }

    /// Notes that a handle is mapped at `at` for blocks to use.
    pub(crate) fn mapped_at(&mut self, id: HandleId, at: u32) {
        let Some(Some(handle)) = self.handles.get_mut(id as usize) else { return };
        handle.home = Some(at);
        let range = at..at + handle.granules;
        self.mapped.set(range.clone(), true);
        self.enter(id, range);
    }

    /// Enters a handle's mapping into the page table.
    fn enter(&mut self, id: HandleId, range: Range<u32>) {
        if self.pages.len() < range.end as usize {
            self.pages.resize((range.end as usize).next_power_of_two(), Page::default());
        }
        for (offset, granule) in range.clone().enumerate() {
            self.pages[granule as usize] = Page { handle: id, offset: offset as u32 };
        }
        self.edges.set_handle(range);
    }

    /// Notes that a handle has no mapping for blocks any more.
    pub(crate) fn take_home(&mut self, id: HandleId) {
        if let Some(Some(handle)) = self.handles.get_mut(id as usize) {
            handle.home = None;
        }
    }

    /// Notes that the mapping at `range` is gone.
    pub(crate) fn unmapped(&mut self, range: Range<u32>) {
        self.mapped.set(range.clone(), false);
        self.zombie.set(range.clone(), false);
        for granule in range {
            if let Some(page) = self.pages.get_mut(granule as usize) {
                *page = Page::default();
            }
        }
    }

    /// Notes that a handle's mapping at its home is a zombie from now on (the handle is mapped elsewhere).
    pub(crate) fn left_behind(&mut self, zombie: Zombie) {
        let range = zombie.at..zombie.at + zombie.granules;
        self.mapped.set(range.clone(), false);
        self.zombie.set(range, true);
        if let Some(Some(handle)) = self.handles.get_mut(zombie.handle as usize) {
            handle.zombies += 1;
        }
        self.zombies.push(zombie);
    }

    /// Notes a mapping that nobody may use, beside the handle's home if it has one: a zombie from the start.
    pub(crate) fn stillborn(&mut self, zombie: Zombie) {
        self.enter(zombie.handle, zombie.at..zombie.at + zombie.granules);
        self.left_behind(zombie);
    }

    /// Notes that a zombie mapping was unmapped. A handle that had no other is cached.
    pub(crate) fn buried(&mut self, zombie: &Zombie) {
        self.unmapped(zombie.at..zombie.at + zombie.granules);
        let Some(Some(handle)) = self.handles.get_mut(zombie.handle as usize) else { return };
        handle.zombies -= 1;
        if handle.zombies == 0 && handle.home.is_none() {
            self.put_cached(zombie.handle);
        }
    }

    /// Notes a second mapping: what is used there is lent by the home from now on.
    pub(crate) fn joined(&mut self, join: Join) {
        self.enter(join.handle, join.at..join.at + join.granules);
        self.set_usable(join.used_granules(), true);
        self.set_usable(join.shadow_granules(), false);
        self.set_home(&join, false);
        self.joins.push(join);
    }

    /// Notes that a second mapping is not used any more, and is a zombie up to this epoch: the home has all of the handle
    /// again.
    pub(crate) fn parted(&mut self, index: usize, epoch: u32) -> Join {
        let join = self.joins.swap_remove(index);
        self.lent.set(join.shadow_granules(), false);
        self.set_home(&join, true);
        let Join { handle, granules, at, segment, shadow: node, .. } = join;
        self.left_behind(Zombie { handle, at, granules, epoch, segment, node });
        join
    }

    fn set_usable(&mut self, granules: Range<u32>, usable: bool) {
        self.mapped.set(granules.clone(), usable);
        self.lent.set(granules, !usable);
    }

    /// Notes whether the home has what a join uses.
    fn set_home(&mut self, join: &Join, usable: bool) {
        let Some(Some(handle)) = self.handles.get_mut(join.handle as usize) else { return };
        handle.joined = !usable;
        if let Some(home) = handle.home {
            self.set_usable(home + join.used.start..home + join.used.end, usable);
        }
    }

    /// Bytes of metadata held.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Page>() + self.handles.capacity() * size_of::<Option<Handle>>()
    }

    /// Checks the page table against the handles (invariants I7, I8).
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut granules = 0u64;
        let mut homes = 0u32;
        for (id, handle) in self.handles() {
            granules += u64::from(handle.granules);
            let Some(home) = handle.home else { continue };
            homes += handle.granules;
            let join = self.joins.iter().find(|join| join.handle == id);
            if join.is_some() != handle.joined {
                return Err(format!("handle {id} and the list of joins differ"));
            }
            for offset in 0..handle.granules {
                let lent = join.is_some_and(|join| join.used.contains(&offset));
                let usable = |granule| (self.mapped.contains(granule), self.lent.contains(granule));
                if let Some(at) = join.map(|join| join.at + offset)
                    && (self.page(at) != (Page { handle: id, offset }) || usable(at) != (lent, !lent))
                {
                    return Err(format!("granule {offset} of handle {id} is not where it is joined"));
                }
                if self.page(home + offset) != (Page { handle: id, offset }) || usable(home + offset) != (!lent, lent) {
                    return Err(format!("granule {} of handle {id} is not where its home says", offset));
                }
            }
        }
        if granules != self.reserved {
            return Err(format!("handles hold {granules} granules, the counter says {}", self.reserved));
        }
        let mapped = self.mapped.iter().count();
        if mapped != homes as usize {
            return Err(format!("{mapped} granules mapped, {homes} in handles with a home"));
        }
        for join in &self.joins {
            let handle = self.handle(join.handle).filter(|handle| handle.home.is_some());
            if handle.map(|handle| handle.granules) != Some(join.granules)
                || (join.used.start > 0) == (join.used.end < join.granules)
            {
                return Err(format!("handle {} is joined without a home, or no end of it", join.handle));
            }
        }
        let lent: u32 = self.joins.iter().map(|join| join.granules).sum();
        if self.lent.iter().count() != lent as usize {
            return Err("the set of what is lent and the list of joins differ".into());
        }
        let zombies: u32 = self.zombies.iter().map(|zombie| zombie.granules).sum();
        if self.zombie.iter().count() != zombies as usize {
            return Err("the zombie set and the zombie list differ".into());
        }
        Ok(())
    }
}
