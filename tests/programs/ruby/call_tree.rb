# SPDX-License-Identifier: Apache-2.0
#
# call_tree.rb SIZE THREADS: a known call tree. Ten times down, each through Array#each, which is C; there
# heavy, light and caught in the proportion 3 to 1 to 1.

DEPTH = 10

def spin(n)
  x = n | 1
  i = 0
  while i < n
    x = (x * 25_173 + 13_849) & 65_535
    i += 1
  end
  x
end

def heavy(n)
  spin(3 * n) ^ 1
end

def light(n)
  spin(n) ^ 2
end

def caught(n)
  raise ArgumentError
rescue ArgumentError
  spin(n) ^ 3
end

def down(depth, n)
  total = 0
  if depth > 0
    [depth - 1].each do |it|
      total += down(it, n)
    end
    return total
  end
  heavy(n) + light(n) + caught(n)
end

# Garbage, methods that are made of blocks, missing methods, enumerators (fibers) and comparisons.
class Others
  define_method(:defined) { |n| down(0, n) }

  def method_missing(name, *arguments)
    name == :absent ? down(0, *arguments) : super
  end

  def respond_to_missing?(*)
    true
  end
end

def others(n)
  it = Others.new
  it.defined(n)
  it.absent(n)
  it.send(:down, 0, n)
  Array.new(n >> 3) { |i| i.to_s }.sort { |a, b| b <=> a }.map(&:to_sym)
  each = Enumerator.new { |y| 2.times { y << down(0, n) } }
  each.next
end

def work(n)
  loop do
    down(DEPTH, n)
    others(n)
  end
end

size, threads = ARGV.map(&:to_i)
puts "ready"
$stdout.flush
(1...threads).each { Thread.new { work(size) } }
work(size)
